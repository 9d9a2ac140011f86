"""What fits where, from the memory model: tables that ``benchmarks.figures`` writes into a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from lightning_thd.cli.memory_plan import room_of
from lightning_thd.memory import CARDS_GB, MemoryModel, Training

_GB = 10**9
# Sizes from the models' published config.json.
LLAMA_1B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
QWEN_1_5B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN_4B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
QWEN_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
MODELS = {
    "Llama 3.2 1B": LLAMA_1B,
    "Qwen2.5 1.5B": QWEN_1_5B,
    "Qwen3 4B": QWEN_4B,
    "Llama 3.1 8B": LLAMA_8B,
    "Qwen3 30B-A3B": QWEN_30B,
}
_BASE = Training(precision="bf16-true", optimizer="adamw")
_CHECKPOINTS = replace(_BASE, checkpointing=True)
_TILES = replace(_CHECKPOINTS, mlp_tile=2048)
_OFFLOAD = replace(_TILES, offload=True)
WAYS = {"no option": _BASE, "checkpointing": _CHECKPOINTS, "and tiles": _TILES, "and offload": _OFFLOAD}
_LONG = {"128k": 131_072, "1M": 1_048_576}
# devices -> data-parallel and context-parallel ranks, for each length
_RANKS = {"128k": {1: (1, 1), 8: (1, 8), 64: (8, 8)}, "1M": {1: (1, 1), 8: (1, 8), 64: (1, 64)}}


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def long_contexts() -> str:
    """Return the memory of a device that trains 8B on long packs, by options and number of devices."""
    model = MemoryModel.from_config(LLAMA_8B)
    columns = ["GB on each device", *(f"{name}, {n}" for name in _LONG for n in _RANKS[name])]
    rows = []
    for way, training in WAYS.items():
        cells = [way]
        for name, slots in _LONG.items():
            for data, context in _RANKS[name].values():
                ranks = replace(training, data=data, context=context, sharded=data * context > 1)
                cells.append(f"{model.peak(slots, ranks) / _GB:,.0f}")
        rows.append(cells)
    return _markdown(columns, rows)


def capacities() -> str:
    """Return the largest capacity by model and card: all weights trained on one device, and on eight."""
    columns = ["largest capacity", *(f"{card} GB" for card in CARDS_GB)]
    rows = []
    for name, config in MODELS.items():
        model = MemoryModel.from_config(config)
        for devices, way in (
            (1, "checkpointing"),
            (1, "and offload"),
            (8, "checkpointing"),
            (8, "and offload"),
        ):
            training = replace(WAYS[way], data=devices, sharded=devices > 1)
            found = [model.largest_capacity(room_of(card), training, multiple=1024) for card in CARDS_GB]
            label = "checkpointing" if way == "checkpointing" else "checkpointing, tiles, offload"
            rows.append([f"{name}, {devices} x, {label}", *(f"{n:,}" if n else "-" for n in found)])
    return _markdown(columns, rows)
