"""The long runs' own arithmetic, and a short one of each."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.trust.combinations import Tally, draw
from tests.trust.combined_job import Outcome, run_cases
from tests.trust.determinism import compare
from tests.trust.disasters import left_behind
from tests.trust.record import record
from tests.trust.security import LOADS, audited, loads
from tests.trust.soak import drift, soak


def test_a_leak_is_a_slope() -> None:
    seconds = np.arange(0.0, 100.0)
    flat = np.stack([seconds, 0 * seconds + 500, 0 * seconds + 9, 0 * seconds + 4, seconds, seconds], axis=1)
    assert drift(flat)["memory MiB an hour"] == pytest.approx(0.0, abs=1e-6)
    leaking = flat.copy()
    leaking[:, 1] += seconds / 3600 * 50
    leaking[:, 2] += seconds > 50
    assert drift(leaking)["memory MiB an hour"] == pytest.approx(50.0)
    assert drift(leaking)["open files more"] == 1


def test_a_section_is_replaced_and_the_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "TRUST.md"
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "soak", "--minutes", "3", "--say", "/some/where"])
    record("soak", {"steps": 1}, file)
    record("chaos", {"kills": 4}, file)
    record("soak", {"steps": 2}, file)
    text = file.read_text()
    assert text.count("## soak") == 1
    assert "`-m soak --minutes 3`" in text
    assert "| steps | 2 |" in text
    assert "| steps | 1 |" not in text
    assert "| kills | 4 |" in text


def test_a_few_steps_of_soak(tmp_path: Path) -> None:
    found = soak(60.0, tmp_path, max_steps=30, wandb=False)
    assert found["steps"] == 30
    assert found["open files more"] <= 2


def test_combinations_on_one_process_are_right_or_refused() -> None:
    rng, tally = random.Random(1), Tally()
    cases = [case for case in (draw(rng) for _ in range(60)) if case.world == 1][:12]
    for case, outcome in zip(cases, run_cases(cases), strict=True):
        tally.add(case, [outcome])
    assert not tally.wrong, tally.wrong
    assert tally.outcomes["right"] >= 3


def test_ranks_that_find_different_things_are_wrong() -> None:
    tally, case = Tally(), draw(random.Random(0))
    tally.add(case, [Outcome("right", error=1e-12), Outcome("refused", "ValueError: 3 is odd")])
    tally.add(case, [Outcome("refused", "ValueError: 3 is odd"), Outcome("refused", "ValueError: 5 is odd")])
    assert tally.outcomes == {"ranks differ": 1, "refused": 1}
    assert list(tally.refusals) == ["ValueError: N is odd"]
    assert len(tally.wrong) == 1


def test_ranks_that_end_are_wrong_unless_a_stage_refused() -> None:
    rng, tally = random.Random(0), Tally()
    cases = [draw(rng) for _ in range(200)]
    stages = next(case for case in cases if case.where.pp > 1)
    ranks = next(case for case in cases if case.where.dp > 1 and case.where.pp == 1)
    refused = [Outcome("refused", "ValueError: 3 is odd")]
    tally.add_ended(stages, refused, "died")
    tally.add_ended(ranks, refused, "died")
    tally.add_ended(stages, [], "hung")
    tally.add_ended(stages, [Outcome("crashed", "IndexError")], "died")
    assert tally.outcomes == {"refused by one stage": 1, "died or hung": 3}
    assert len(tally.wrong) == 3
    tally.add(stages, [*refused, Outcome("ended")])
    tally.add(ranks, [*refused, Outcome("ended")])
    assert tally.outcomes == {"refused by one stage": 2, "died or hung": 3, "ranks differ": 1}


def test_every_place_that_loads_objects_is_reviewed() -> None:
    assert set(loads()) == set(LOADS)


def test_what_no_data_was_found_on_is_not_called_safe() -> None:
    known = {"name": "a", "version": "1", "vulns": []}
    bad = {"name": "b", "version": "1", "vulns": [{"id": "CVE-1"}]}
    unknown = {"name": "c", "skip_reason": "Dependency not found on PyPI"}
    assert audited([unknown, unknown]) == "not scanned: pip-audit reached no data on any of 2 packages"
    assert audited([known, bad]) == "b CVE-1 in 2 packages"
    assert audited([known, unknown]) == "none in 1 packages, 1 unknown to its data"


def test_what_a_job_leaves_behind_is_seen(tmp_path: Path) -> None:
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env={"THD_CHAOS_JOB": f"{tmp_path}/a"}
    )
    try:
        assert left_behind(tmp_path, "a", within_s=1.0) == [sleeper.pid]
        assert left_behind(tmp_path, "b", within_s=0.1) == []
    finally:
        sleeper.kill()
        sleeper.wait()
    assert left_behind(tmp_path, "a", within_s=5.0) == []


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits() -> None:
    assert all(compare(steps=10).values())
