"""Disasters, one after the other, on changing ranks: nothing is lost, nothing comes twice."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.chaos import ForkedJob, lines, run_until, start, surviving_line
from tests.chaos_job import PER_STEP, SEQUENCES, Ledger, train
from tests.tiny import largest_error
from tests.trust.disasters import JOB, KINDS, Scene, left_behind

KILLS = ("SIGKILL of the whole job",)


def survive(out: Path, count: int, seed: int, kinds: tuple[str, ...] = KILLS) -> Counter[str]:
    """Let disasters strike one job until it is through with its epoch, or for a number of times."""
    rng = random.Random(seed)
    struck = Counter[str]()
    names = []
    out.mkdir(exist_ok=True)

    for k in range(count):
        names.append(f"{k:03d}")
        kind = kinds[(seed + k) % len(kinds)]
        workers = 2 if "loader" in kind else rng.choice([0, 2])
        KINDS[kind](Scene(out, names[-1], rng.choice([1, 2, 4]), workers, rng))
        struck[kind] += 1
        if (out / "final.pt").exists():
            break

    if not (out / "final.pt").exists():
        names.append("last")
        job = start(JOB, out, rng.choice([1, 2, 4]), "last")
        assert job.wait(240) == 0, (out / "last.log").read_text()
        assert not left_behind(out, "last")

    check(out, names)
    return struck


def check(out: Path, names: list[str]) -> None:
    """Compare what a job used, all runs together, and its parameters with one undisturbed run."""
    steps = surviving_line(out, names)
    assert sorted(steps) == list(range(SEQUENCES // PER_STEP))
    assert all(len(ids) == PER_STEP for ids in steps.values())
    assert sorted(i for ids in steps.values() for i in ids) == list(range(SEQUENCES))

    alone = Ledger()
    train(alone, out / "alone", 1, num_workers=0)
    trained = torch.load(out / "final.pt")
    # fp64: other ranks add the same gradients in another order, nothing else differs.
    assert largest_error(trained, {n: p.detach() for n, p in alone.model.named_parameters()}) < 1e-10


def test_two_kills_of_forked_ranks(tmp_path: Path) -> None:
    rng = random.Random(7)
    names = ["first", "second", "last"]
    for name, ranks in zip(names, (2, 1, 4), strict=True):
        job = ForkedJob(JOB, tmp_path, ranks, name, "0")  # workers would import torch again, ten seconds each
        if name != "last":
            run_until(job, tmp_path, lines(tmp_path) + rng.randint(3, 7) * ranks)
            assert job.poll() is None, (tmp_path / f"{name}.log").read_text()
            job.kill()
    try:
        assert job.wait(240) == 0, (tmp_path / "last.log").read_text()
    finally:
        job.kill()
    check(tmp_path, names)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_disaster_of_every_kind(kind: str, tmp_path: Path) -> None:
    assert survive(tmp_path, 4, seed=11, kinds=(*KILLS, kind))[kind] > 0
