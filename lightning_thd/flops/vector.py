"""SeqStats <-> a list of integers of fixed length, the form in which they cross ranks and fill tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from lightning_thd.flops.model import FlopsModel
from lightning_thd.stats import SeqStats

COUNTS = tuple(field.name for field in fields(SeqStats) if not field.name.endswith("window_pairs"))


def num_ints(model: FlopsModel | None) -> int:
    """Return the length of the list for the windows of ``model``."""
    return len(COUNTS) + (len(model.windows) + len(model.vision_windows) if model else 0)


def to_ints(stats: SeqStats, model: FlopsModel | None) -> list[int]:
    """Return the counts as a list in a fixed order, then the pairs of every window of ``model``."""
    counts = [int(getattr(stats, name)) for name in COUNTS]
    if model is None:
        return counts
    pairs, areas = dict(stats.window_pairs), dict(stats.vision_window_pairs)
    return [
        *counts,
        *(pairs.get(window, 0) for window in model.windows),
        *(areas.get(edge, 0) for edge in model.vision_windows),
    ]


def from_ints(values: Sequence[int] | Sequence[float], model: FlopsModel | None) -> SeqStats:
    """Return the ``SeqStats`` that a list made by ``to_ints`` describes."""
    if len(values) != num_ints(model):
        raise ValueError(
            f"{len(values)} counts came where {num_ints(model)} were wanted: they were made for a model with "
            "other attention windows. Start the counter anew for this one."
        )
    whole = [int(value) for value in values]
    rest = iter(whole[len(COUNTS) :])
    windows = tuple((window, next(rest)) for window in model.windows) if model else ()
    areas = tuple((edge, next(rest)) for edge in model.vision_windows) if model else ()
    counts = dict(zip(COUNTS, whole, strict=False))
    return SeqStats(**counts, window_pairs=windows, vision_window_pairs=areas)
