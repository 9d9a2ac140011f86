"""The same job again and again -> whether its parameters are bitwise the same.

``python -m tests.trust.determinism`` writes its table into ``benchmarks/TRUST.md``.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from typing import Any

import torch

from lightning_thd import Sequences, THDDataModule
from tests.ranks import run_ranks
from tests.strategies.jobs import Job, Layout, full_parameters, make_trainer
from tests.tiny import sequences
from tests.trust.record import record

STEPS = 50


def digest(layout: Layout, workers: int, steps: int = STEPS) -> str:
    """Train some steps in fp32 and hash every bit of the parameters; on ranks, whole parameters."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    module = Job("qwen3", torch.float32)
    strategy: dict[str, Any] = {"strategy": "thd"} if layout.world == 1 else {}
    trainer = make_trainer(layout, "qwen3", max_steps=steps, **strategy)
    data = THDDataModule(
        sequences(160, labels=True), capacity=64, global_batch=Sequences(12), num_workers=workers
    )
    trainer.fit(module, data)
    hasher = hashlib.sha256()
    for name, value in sorted(full_parameters(module.model).items()):
        hasher.update(name.encode())
        hasher.update(value.contiguous().numpy().tobytes())
    return hasher.hexdigest()


def compare(steps: int = STEPS) -> dict[str, bool]:
    """Say of every comparison whether the parameters are bitwise equal."""
    one = digest(Layout(), 0, steps)
    same = {"run to run": digest(Layout(), 0, steps) == one}
    for workers in (2, 4):
        same[f"{workers} loader processes against none"] = digest(Layout(), workers, steps) == one
    layouts = {
        "dp 2 (THDDDPStrategy)": Layout(strategy="thd_ddp", dp=2),
        "dp 2 (FSDP2)": Layout(dp=2),
        "cp 2": Layout(strategy="thd_ddp", cp=2),
        "tp 2": Layout(tp=2),
        "pp 2": Layout(pp=2),
    }

    for name, layout in layouts.items():
        first, again = (run_ranks(digest, layout.world, layout, 0, steps) for _ in range(2))
        alike = layout.pp > 1 or len(set(first)) == 1  # a stage has parameters of its own
        same[f"{name}, run to run, on every rank"] = first == again and alike

    return same


def main() -> None:
    same_of = compare()
    record(
        "determinism",
        {
            f"{STEPS} steps of one seed, fp32, bitwise: {name}": "yes" if same else "NO"
            for name, same in same_of.items()
        }
        | {"one number of ranks against another": "equal to rounding alone: sums are added in another order"},
    )
    sys.exit(0 if all(same_of.values()) else 1)


if __name__ == "__main__":
    main()
