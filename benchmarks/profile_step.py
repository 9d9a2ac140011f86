"""A training step by part, in CPU seconds, beside the floor that its products set.

``python -m benchmarks.profile_step`` runs the quickstart's step on one thread and adds up the CPU time of its
operators: products (the head's and the loss's included), attention, the optimizer, elementwise work, copies;
everything else is Python and autograd. Floor: the FLOPs of the step at the rate of the MLP's product,
measured here in CPU time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.end_to_end import floor_seconds, make_model, packs
from benchmarks.results import keep
from lightning_thd import causal_lm_loss
from lightning_thd.batch import THDBatch
from lightning_thd.module import adamw

# The first part whose words are in an operator's name takes its time.
PARTS = {
    "attention": ("varlen_attention", "_scaled_dot_product"),
    "optimizer": ("_fused_adam", "_foreach"),
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn", "baddbmm"),
    "copies and casts": ("copy", "::cat", "index", "clone", "zero_", "fill_", "stack"),
    "elementwise and sums": ("::",),
}


class ByPart(TorchDispatchMode):
    """Adds up the CPU time of every operator that runs, backward passes included, by part."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begun = time.process_time()
        result = func(*args, **(kwargs or {}))
        name = func.name()
        part = next(part for part, words in PARTS.items() if any(word in name for word in words))
        self.seconds[part] += time.process_time() - begun
        return result


def parts_of(step: Callable[[], None], repeat: int) -> tuple[dict[str, float], float]:
    """Return CPU seconds of every part of a step, and of the whole process in steps that nobody watches."""
    step()
    watched = ByPart()
    whole = 0.0
    for _ in range(repeat):  # in turn, so that both meet the same neighbours
        begun = time.process_time()
        step()
        whole += time.process_time() - begun
        with watched:
            step()
    return {part: seconds / repeat for part, seconds in watched.seconds.items()}, whole / repeat


def make_step(batch: THDBatch, dtype: torch.dtype) -> Callable[[], None]:
    model = make_model("thd")
    optimizer = adamw(model.parameters(), lr=1e-4, betas=(0.9, 0.95))

    def step() -> None:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            loss = causal_lm_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeat", type=int, default=2)
    args = parser.parse_args(argv)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    batches = packs(64)[:1]  # one pack of the quickstart's size
    for dtype, word in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        found, whole = parts_of(make_step(batches[0], dtype), args.repeat)
        _, rate, floor = floor_seconds(batches, dtype)
        print(f"\n{word}: {whole:.3f} CPU s a step of {batches[0].stats.real_tokens:,} tokens, one thread")
        for name, seconds in [*found.items(), ("everything else", whole - sum(found.values()))]:
            print(f"  {name:24}{seconds:8.3f} s{seconds / whole:8.1%}")
        print(f"  {'floor':24}{floor:8.3f} s{floor / whole:8.1%}  (all FLOPs at {rate / 1e9:,.0f} GFLOP/s)")
        known = sum(found.values()) / whole
        keep("share of a step's CPU time that has a name", known, "", at_least=0.9, precision=word)
    torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
