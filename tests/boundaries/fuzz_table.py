"""Public functions of boundaries, for ``tests.fuzz``."""

from __future__ import annotations

import random
from typing import Any

from lightning_thd.boundaries import Boundaries
from tests.fuzz import Entry


def _lengths(rng: random.Random) -> dict[str, Any]:
    return {"lengths": [rng.randint(1, 9) for _ in range(rng.randint(1, 5))], "device": "cpu"}


def _adds_up(given: dict[str, Any], boundaries: Boundaries) -> None:
    assert boundaries.slots == sum(boundaries.lengths) == int(boundaries.offsets[-1])


TABLE = {"boundaries.Boundaries.from_lengths": Entry(Boundaries.from_lengths, _lengths, _adds_up)}
