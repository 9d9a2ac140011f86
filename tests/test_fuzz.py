"""Public functions answer, or raise ValueError or TypeError; ``python -m tests.fuzz 10000`` tries more."""

from __future__ import annotations

import pytest

from tests.fuzz import fuzz


def test_five_hundred_calls() -> None:
    outcomes, failures = fuzz(500)
    assert failures == []
    assert outcomes["answered"] > 100
    assert outcomes["ValueError"] + outcomes["TypeError"] > 100


@pytest.mark.slow
def test_ten_thousand_calls() -> None:
    assert fuzz(10_000, seed=1)[1] == []
