"""Settings of a planner and the key of its data -> the planner, its windows counted once for all runs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_thd.data.store.arrays import cached_arrays
from lightning_thd.packing import PackPlanner, Sequences

_VERSION = 1
# What decides the packs of a window; the rest of a planner's settings may change under the same counts.
_DECIDES = ("align", "window", "oversize", "seed")


def plan_counted_once(
    plan: partial[PackPlanner], key: Mapping[str, Any], cache_dir: str | Path | None
) -> PackPlanner:
    """Make a planner, with the packs of every window from the cache if another run counted them.

    The planner compares each window that it packs with its count, so that counts of other data cannot pass.

    Args:
        plan: ``PackPlanner`` with all its arguments but ``counts``.
        key: what the lengths are known by.
        cache_dir: where counts are kept.
    """
    if isinstance(plan.keywords["global_batch"], Sequences) or plan.keywords["schedule"] is not None:
        return plan()
    made: list[PackPlanner] = []

    def count() -> dict[str, npt.NDArray[np.uint32]]:
        made.append(plan())
        counts = made[0].counts
        assert counts is not None
        return {"counts": counts}

    settings = {name: repr(plan.keywords[name]) for name in _DECIDES}
    found = cached_arrays(
        "counts",
        {"of": dict(key), "capacity": plan.args[1], **settings},
        count,
        version=_VERSION,
        cache_dir=cache_dir,
    )
    return made[0] if made else plan(counts=np.asarray(found["counts"]))
