"""A model cut by depth: which rank holds which layers, who runs what when, and what travels between."""

from lightning_thd.parallel.pipeline.schedule import (
    Op,
    Schedule,
    ScheduleName,
    bubble_fraction,
    expected_bubble,
    make_schedule,
)
from lightning_thd.parallel.pipeline.split import LayerCost, Split, split_layers

__all__ = [
    "LayerCost",
    "Op",
    "Schedule",
    "ScheduleName",
    "Split",
    "bubble_fraction",
    "expected_bubble",
    "make_schedule",
    "split_layers",
]
