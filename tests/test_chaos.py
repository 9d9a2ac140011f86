"""Kill a job with SIGKILL, again and again, on changing ranks: nothing is lost, nothing comes twice."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch

from tests.chaos import kill, lines, run_until, start, surviving_line
from tests.chaos_job import PER_STEP, SEQUENCES, Ledger, train
from tests.tiny import largest_error


def survive(out: Path, kills: int, seed: int) -> int:
    rng = random.Random(seed)
    out.mkdir(exist_ok=True)
    names = []
    for k in range(kills):
        names.append(f"{k:03d}")
        before, ranks = lines(out), rng.choice([1, 2, 4])
        job = start("tests.chaos_job", out, ranks, names[-1])
        run_until(job, out, before + rng.randint(1, 12 * ranks))
        time.sleep(rng.random() * 0.3)
        kill(job)
        assert lines(out) > before or (out / "final.pt").exists(), (out / f"{names[-1]}.log").read_text()
        if (out / "final.pt").exists():
            break
    done = len(names)
    if not (out / "final.pt").exists():
        names.append("last")
        job = start("tests.chaos_job", out, rng.choice([1, 2, 4]), "last")
        assert job.wait(240) == 0, (out / "last.log").read_text()

    steps = surviving_line(out, names)
    assert sorted(steps) == list(range(SEQUENCES // PER_STEP))
    assert all(len(ids) == PER_STEP for ids in steps.values())
    assert sorted(i for ids in steps.values() for i in ids) == list(range(SEQUENCES))

    alone = Ledger()
    train(alone, out / "alone", 1, num_workers=0)
    found = torch.load(out / "final.pt")
    # fp64: other ranks add the same gradients in another order, nothing else differs.
    assert largest_error(found, {n: p.detach() for n, p in alone.model.named_parameters()}) < 1e-10
    return done


def test_four_kills(tmp_path: Path) -> None:
    assert survive(tmp_path, kills=4, seed=7) > 0  # fewer than 4 where the epoch ends before


@pytest.mark.slow
def test_forty_kills(tmp_path: Path) -> None:
    done = 0
    for seed in range(100, 120):  # an epoch is over after some ten kills
        done += survive(tmp_path / str(seed), kills=40 - done, seed=seed)
        if done == 40:
            return
    pytest.fail(f"{done} kills in twenty epochs, wanted 40")
