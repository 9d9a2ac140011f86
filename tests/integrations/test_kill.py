"""Kill a job in every integration: what survives has used every sequence as if nothing had happened.

As a script, ``python -m tests.integrations.test_kill OUT RANKS NAME ENGINE``, it is the job.
"""

from __future__ import annotations

import os
import random
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from lightning_thd import Packs, Sequences
from tests.chaos import kill, lines, run_until, start, surviving_line
from tests.integrations.engines import ENGINES, Job
from tests.ranks import run_ranks
from tests.tiny import largest_error, sequences, tiny_llama

JOB = "tests.integrations.test_kill"
SEQUENCES = 120  # several epochs, and more than three killed runs get through
STEPS = 40


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
    out = Path(sys.argv[1])
    ranks = int(sys.argv[2])
    name = sys.argv[3]
    engine = sys.argv[4]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank = os.environ.get("RANK", "0")
    parameters, _ = job_of(engine, ranks, out, out / f"ledger-{name}-{rank}.txt").run(engine)
    if rank == "0":
        torch.save(parameters, out / "final.pt")


def undisturbed(engine: str, ranks: int) -> tuple[dict[str, torch.Tensor], dict[int, list[int]]]:
    steps: dict[int, list[int]] = {}
    job = job_of(engine, ranks, None, None)
    job.seen = lambda step, ids: steps.setdefault(step, []).extend(ids)
    return job.run(engine)[0], steps


def survive(engine: str, out: Path, kills: int) -> None:
    """Kill a job in one integration a number of times, and compare what survives with an undisturbed run."""
    rng = random.Random(ENGINES.index(engine))
    names = []
    for k in range(kills):
        names.append(str(k))
        before = lines(out)
        ranks = 2 if engine == "trainer" else rng.choice([1, 2])
        job = start(JOB, out, ranks, names[-1], engine)
        run_until(job, out, before + rng.randint(2, 5) * 2)
        time.sleep(rng.random() * 0.2)
        kill(job, out, names[-1])
        assert lines(out) > before, (out / f"{k}.log").read_text()
    names.append("last")
    job = start(JOB, out, 2, "last", engine)
    assert job.wait(240) == 0, (out / "last.log").read_text()

    of_ranks = run_ranks(undisturbed, 2, engine, 2)
    expected: dict[int, list[int]] = {}
    for _, steps in of_ranks:
        for step, ids in steps.items():
            expected.setdefault(step, []).extend(ids)
    survived = surviving_line(out, names)
    assert sorted(survived) == list(range(STEPS))
    assert {step: sorted(ids) for step, ids in survived.items()} == {
        step: sorted(ids) for step, ids in expected.items()
    }
    # fp64: other ranks add the same gradients in another order, nothing else differs.
    assert largest_error(torch.load(out / "final.pt"), of_ranks[0][0]) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_three_kills(engine: str, tmp_path: Path) -> None:
    survive(engine, tmp_path, kills=3)


if __name__ == "__main__":
    main()
