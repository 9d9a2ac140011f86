"""Lengths -> packs, packs -> ranks, (epoch, step) -> plan: pure functions of integers."""

from lightning_thd.packing.balance import Scheduler, balance
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
