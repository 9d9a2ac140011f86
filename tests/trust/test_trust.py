"""The long runs' own arithmetic, and a short one of each."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.trust.combinations import Tally, draw
from tests.trust.combined_job import run_cases
from tests.trust.determinism import compare
from tests.trust.disasters import left_behind
from tests.trust.record import FILE
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


def test_a_few_steps_of_soak(tmp_path: Path) -> None:
    measured = soak(60.0, tmp_path, max_steps=4, wandb=False)
    assert measured["steps"] == 4
    assert measured["open files more"] <= 2


def test_combinations_on_one_process_are_right_or_refused() -> None:
    rng = random.Random(1)
    tally = Tally()
    cases = [case for case in (draw(rng) for _ in range(60)) if case.world == 1][:12]
    for case, outcome in zip(cases, run_cases(cases), strict=True):
        tally.add(case, [outcome])
    assert not tally.wrong, tally.wrong
    assert tally.outcomes["right"] >= 3


def test_every_place_that_loads_objects_is_reviewed() -> None:
    assert set(loads()) == set(LOADS)
    section = FILE.read_text().partition("\n## security\n")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `([^`]+)` \|", section, re.M))
    assert listed == set(LOADS), "run make security, which writes TRUST.md"


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
