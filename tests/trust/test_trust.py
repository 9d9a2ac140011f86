"""The long runs' own arithmetic, and a short one of each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.trust.record import record
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


def test_a_section_is_replaced_and_the_others_stay(tmp_path: Path) -> None:
    file = tmp_path / "TRUST.md"
    record("soak", {"steps": 1}, file)
    record("chaos", {"kills": 4}, file)
    record("soak", {"steps": 2}, file)
    text = file.read_text()
    assert text.count("## soak") == 1
    assert "| steps | 2 |" in text
    assert "| steps | 1 |" not in text
    assert "| kills | 4 |" in text


def test_a_few_steps_of_soak(tmp_path: Path) -> None:
    found = soak(60.0, tmp_path, max_steps=30)
    assert found["steps"] == 30
    assert found["open files more"] <= 2
