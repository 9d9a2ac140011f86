"""A planner -> layouts of the batches it will make, without reading a sequence."""

from __future__ import annotations

from itertools import islice

import numpy as np

from lightning_thd.cuda_graph.shapes.buckets import Layout
from lightning_thd.packing import PackPlanner
from lightning_thd.packing.entries import summarize

# P99 of 512 batches rests on five of them; a plan of a step takes about a millisecond.
_SAMPLE = 512


def sample_layouts(planner: PackPlanner, *, dp: int = 1) -> list[Layout]:
    """Return up to 512 layouts of microbatches of steps spread over an epoch, the same on every rank."""
    steps = np.random.default_rng(0).choice(len(planner), size=min(len(planner), _SAMPLE), replace=False)
    found = (
        Layout.of(planner.slots.padded(spans.lengths).tolist())
        for k in steps.tolist()
        for rank in planner.step(0, k, dp).spans_by_rank()
        for spans in rank
    )
    return list(islice(found, _SAMPLE))


def longest_sequence(planner: PackPlanner) -> int:
    """Return the most slots any sequence of the planner's data takes in a pack."""
    longest = min(summarize(planner.entries.lengths).longest, planner.slots.usable)
    return int(planner.slots.padded(np.array([longest]))[0])
