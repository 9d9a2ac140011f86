"""A model cut by depth: the layers each rank holds, the order of passes, and the messages between ranks."""

from lightning_thd.parallel.pipeline.schedule import (
    Op,
    Schedule,
    ScheduleName,
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
    "expected_bubble",
    "make_schedule",
    "split_layers",
]
