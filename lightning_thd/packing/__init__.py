"""Lengths -> packs, packs -> ranks, (epoch, step) -> plan: pure functions of integers."""

from typing import TYPE_CHECKING

from lightning_thd._lazy import know_thd, lazy_face

if TYPE_CHECKING:
    from lightning_thd.packing.balancing import Scheduler, balance
    from lightning_thd.packing.bins import Packing, pack_lengths
    from lightning_thd.packing.cost import Cost
    from lightning_thd.packing.entries import LengthSummary
    from lightning_thd.packing.plan import Packs, Sequences, Spans, StepPlan
    from lightning_thd.packing.planner import PackPlanner

__all__ = [
    "Cost",
    "LengthSummary",
    "PackPlanner",
    "Packing",
    "Packs",
    "Scheduler",
    "Sequences",
    "Spans",
    "StepPlan",
    "balance",
    "pack_lengths",
]

_PLACES = {
    "Cost": "lightning_thd.packing.cost",
    "LengthSummary": "lightning_thd.packing.entries",
    "PackPlanner": "lightning_thd.packing.planner",
    "Packing": "lightning_thd.packing.bins",
    "Packs": "lightning_thd.packing.plan",
    "Scheduler": "lightning_thd.packing.balancing",
    "Sequences": "lightning_thd.packing.plan",
    "Spans": "lightning_thd.packing.plan",
    "StepPlan": "lightning_thd.packing.plan",
    "balance": "lightning_thd.packing.balancing",
    "pack_lengths": "lightning_thd.packing.bins",
}
if not TYPE_CHECKING:  # a type checker then still reports names that do not exist
    __getattr__, __dir__ = lazy_face(__name__, _PLACES, before=know_thd)
