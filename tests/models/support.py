"""Tiny models, packs and losses that several test files of this folder build."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.families import samples
from benchmarks.tiny_configs import tiny
from lightning_thd.batch import THDBatch

ORIGINAL = 12
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 5.0, 9.0],
    "original_max_position_embeddings": ORIGINAL,
    "factor": 4.0,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3 longrope": ("Phi3", {"rope_parameters": LONGROPE, "max_position_embeddings": 48}),
    "llama dynamic": ("Llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL}),
    # one complex number in the place of cosine and sine
    "llama4 dynamic": ("Llama4Text", {"rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL}),
}


def build_rope(name: str, attention: str) -> Any:
    family, arguments = ROPES[name]
    config = tiny(getattr(transformers, f"{family}Config"), dict(arguments))
    if name == "phi3 longrope":
        config.original_max_position_embeddings = ORIGINAL
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def documents(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(8, 100, (n,), generator=generator) for n in lengths]


def alone(name: str, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():  # a fresh model each: a dynamic rope remembers the longest sequence it has met
        return build_rope(name, "eager")(input_ids=ids[None], use_cache=False).logits[0]


def pack(**arguments: Any) -> THDBatch:
    return THDBatch.collate([{"input_ids": ids} for ids in samples()], **arguments)


def loss_alone(stock: Any) -> Tensor:
    """Average the loss over the predicted tokens of all sequences, each alone."""
    total = torch.zeros(())
    tokens = 0
    for ids in samples():
        if len(ids) > 1:
            total = total + stock(input_ids=ids[None], labels=ids[None]).loss * (len(ids) - 1)
            tokens += len(ids) - 1
    return total / tokens
