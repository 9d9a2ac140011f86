"""Real tokens per second of a model on the same documents: ours, transformers' flattened batch, padded.

python -m benchmarks.end_to_end [--batches 4] [--rounds 2]

The quickstart's Qwen3 trains on the standard library's functions, forward, backward and AdamW. Every way gets
the same documents in every round: those of a few packs of 8,192 tokens. Flattened is transformers' own packed
batch (DataCollatorWithFlattening: position_ids, sdpa, the model's own loss). Padded: batches of 8.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Qwen3Config

from benchmarks.results import more
from lightning_thd import FlopsModel, THDBatch, THDDataModule, causal_lm_loss
from lightning_thd.data import ByteTokenizer, StdlibText
from lightning_thd.flops import SeqStats

CAPACITY = 8_192
GOALS = {"flattened": 3.0, "padded": 4.0}
Step = Callable[[nn.Module], Tensor]


def make_model(attention: str) -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(
        num_hidden_layers=4,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=768,
        vocab_size=ByteTokenizer.vocab_size,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()


def packs(count: int) -> list[THDBatch]:
    data = THDDataModule(StdlibText(max_bytes=2048), capacity=CAPACITY, oversize="split")
    data.setup("fit")
    loader = iter(data.train_dataloader())
    return [batch for _, batch in zip(range(count), loader, strict=False) if isinstance(batch, THDBatch)]


def ours(batches: list[THDBatch]) -> list[Step]:
    return [lambda model, batch=batch: causal_lm_loss(model, batch) for batch in batches]


def flattened(batches: list[THDBatch]) -> list[Step]:
    return [_flattened_step(batch) for batch in batches]


def _flattened_step(batch: THDBatch) -> Step:
    documents = [{"input_ids": ids.tolist()} for ids in batch.unpack(batch.input_ids)]
    inputs = DataCollatorWithFlattening(return_tensors="pt")(documents)
    return lambda model: model(**inputs, use_cache=False).loss


def padded(batches: list[THDBatch]) -> list[Step]:
    # Shuffled first: a pack's own documents are of like length, an ordinary batch's are not.
    documents = [ids for batch in batches for ids in batch.unpack(batch.input_ids)]
    random.Random(0).shuffle(documents)
    return [_padded_step(documents[i : i + 8]) for i in range(0, len(documents), 8)]


def _padded_step(documents: list[Tensor]) -> Step:
    ids = nn.utils.rnn.pad_sequence(documents, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in documents], batch_first=True)
    labels = ids.masked_fill(mask == 0, -100)
    return lambda model: model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss


WAYS: dict[str, tuple[str, Callable[[list[THDBatch]], list[Step]]]] = {
    "ours": ("thd", ours),
    "flattened": ("sdpa", flattened),
    "padded": ("sdpa", padded),
}


def measure(batches: list[THDBatch], rounds: int, ways: list[str]) -> dict[str, list[float]]:
    """Return the seconds of every round of every way, the ways taking turns."""
    models = {name: make_model(WAYS[name][0]) for name in ways}
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-4) for name, model in models.items()}
    steps = {name: WAYS[name][1](batches) for name in ways}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds + 1):
        for name, model in models.items():
            begin = time.perf_counter()
            for step in steps[name] if round_ else steps[name][:1]:  # the first one warms up
                optimizers[name].zero_grad()
                step(model).backward()
                optimizers[name].step()
            if round_:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def floor_seconds(batches: list[THDBatch]) -> tuple[float, float, float]:
    """Return the FLOPs of the batches, the matmul rate measured here, and FLOPs / rate."""
    model = make_model("thd")
    flops_model: Any = FlopsModel.from_config(model.config)
    flops = sum(
        float(flops_model.training_flops(SeqStats.from_lengths(b.lengths, windows=flops_model.windows)).model)
        for b in batches
    )
    a, b = torch.randn(CAPACITY, 256), torch.randn(256, 768)
    times = []
    for _ in range(30):
        begin = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - begin)
    rate = 2 * CAPACITY * 256 * 768 / statistics.median(times)
    return flops, rate, flops / rate


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="ours is always in")
    args = parser.parse_args(argv)
    ways = [name for name in WAYS if name == "ours" or name in args.ways]
    batches = packs(args.batches)
    tokens = sum(batch.stats.real_tokens for batch in batches)
    documents = sum(len(batch) for batch in batches)
    print(f"{documents} documents, {tokens:,} real tokens, {torch.get_num_threads()} threads, fp32")
    rates = {name: tokens / statistics.median(s) for name, s in measure(batches, args.rounds, ways).items()}
    print(f"{'way':12}{'tokens/s':>12}{'ours / it':>12}{'goal':>8}")
    for name, rate in rates.items():
        goal = f"{GOALS[name]:.1f}x" if name in GOALS else ""
        print(f"{name:12}{rate:12,.0f}{rates['ours'] / rate:11.2f}x{goal:>8}")
        if name in GOALS:
            more(f"training, {name}", rates["ours"], rate, "tokens/s", GOALS[name])
    flops, rate, floor = floor_seconds(batches)
    print(
        f"floor: {flops / 1e9:,.0f} GFLOP at {rate / 1e9:,.0f} GFLOP/s, the rate of the MLP's product here, "
        f"is {tokens / floor:,.0f} tokens/s: we reach {rates['ours'] * floor / tokens:.0%} of it"
    )


if __name__ == "__main__":
    main()
