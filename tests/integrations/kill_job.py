"""A job in one of the engines, to be killed: python -m tests.integrations.kill_job OUT RANKS NAME HOST."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch

from lightning_thd import Packs, Sequences
from tests.integrations.engines import Job
from tests.tiny import sequences, tiny_llama

SEQUENCES, STEPS = 120, 40  # several epochs, and more than three killed runs get through


def job_of(engine: str, ranks: int, out: Path | None, file: Path | None) -> Job:
    """Build a job of ``Packs(2)`` for Hugging Face's Trainer, of ``Sequences(12)`` for the other engines."""

    def seen(step: int, ids: tuple[int, ...]) -> None:
        if file is not None:
            with file.open("a") as ledger:
                ledger.write(f"{step} {' '.join(map(str, ids))}\n")

    packs = engine == "trainer"
    return Job(
        tiny_llama,
        sequences(SEQUENCES, labels=True),
        capacity=48,
        step=Packs(4) if packs else Sequences(12),
        accumulate=4 // ranks if packs else 1,
        ranks=ranks,
        steps=STEPS,
        out=out,
        seen=seen,
    )


def main() -> None:
    out, ranks, name, engine = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank = os.environ.get("RANK", "0")
    parameters, _ = job_of(engine, ranks, out, out / f"ledger-{name}-{rank}.txt").run(engine)
    if rank == "0":
        torch.save(parameters, out / "final.pt")


if __name__ == "__main__":
    main()
