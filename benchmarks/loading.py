"""Tokens collated per second: ours, transformers' flattening collator, and a copy of the same bytes.

python -m benchmarks.loading [--rounds 30]

The samples are numpy arrays of ids, a pack at a time, as a dataset in numpy format gives them.
DataCollatorWithFlattening(return_tensors="pt") gives ids, labels and positions; with
return_flash_attn_kwargs it adds the offsets and maxima that we always give. The copy writes what our batch
holds (ids, targets and positions, int64) with one memcpy. Times are those of the
fastest round. The whole loader, reading, planning and collating a
memory-mapped store, is timed as well, a rank's share of packs at once.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import DataCollatorWithFlattening

from benchmarks.results import faster
from lightning_thd import THDBatch, THDDataModule
from lightning_thd.data import TokenStore

GOAL = 10.0
PACKS = {"chat 8k": (8_192, 600, 1.0), "chat 32k": (32_768, 600, 1.0), "long 32k": (32_768, 4_096, 1.1)}


def samples(capacity: int, mean: int, sigma: float, *, labels: bool, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    left = capacity
    while left > 0:
        drawn = int(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma))
        row = {"input_ids": rng.integers(0, 32_000, min(left, max(16, drawn)))}
        if labels:
            row["labels"] = np.where(np.arange(len(row["input_ids"])) < 5, -100, row["input_ids"])
        rows.append(row)
        left -= len(row["input_ids"])
    return rows


def fastest(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the seconds of the least disturbed round of each call, the calls taking turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            for _ in range(4):  # in a row, as a loader calls its collator: the first one warms the caches up
                begin = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - begin)
    return {name: min(values) for name, values in times.items()}


def compare(name: str, rows: list[dict[str, Any]], tokens: int, rounds: int) -> None:
    plain = DataCollatorWithFlattening(return_tensors="pt")
    full = DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=True)
    source, target = torch.ones(3, tokens, dtype=torch.int64), torch.empty(3, tokens, dtype=torch.int64)
    times = fastest(
        {
            "ours": lambda: THDBatch.collate(rows),
            "flattening": lambda: plain(rows),
            "flattening + offsets": lambda: full(rows),
            "memcpy": lambda: target.copy_(source),
        },
        rounds,
    )
    ours = times["ours"]
    for way in ("flattening", "flattening + offsets"):
        faster(f"collate {name}, {way}", ours * 1e6, times[way] * 1e6, "us", GOAL)
    print(f"{name}: {len(rows)} sequences, {tokens:,} tokens")
    for way, seconds in times.items():
        goal = f"goal >= {GOAL:.0f}x" if way.startswith("flattening") else ""
        print(
            f"  {way:22}{seconds * 1e6:10.1f} us{tokens / seconds / 1e6:10.1f} M tokens/s"
            f"{seconds / ours:9.2f}x ours  {goal}"
        )


def loader_rate(workers: int) -> float:
    """Tokens per second of a whole epoch from a store of chats."""
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, 32_000, max(16, int(n))) for n in rng.lognormal(5.9, 1.0, 20_000)]
    data = THDDataModule(TokenStore.from_rows(rows), capacity=32_768, oversize="split", num_workers=workers)
    data.setup("fit")
    loader = data.train_dataloader()
    sum(b.stats.real_tokens for b in loader)  # first epoch: caches and workers warm up
    begin = time.perf_counter()
    total = sum(b.stats.real_tokens for b in loader)
    return total / (time.perf_counter() - begin)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    for name, (capacity, mean, sigma) in PACKS.items():
        for labels in (False, True):
            rows = samples(capacity, mean, sigma, labels=labels)
            compare(f"{name}{', labels' if labels else ''}", rows, capacity, args.rounds)
    for workers in (0, 2):
        print(f"whole loader, {workers} workers: {loader_rate(workers) / 1e6:.1f} M tokens/s")


if __name__ == "__main__":
    main()
