"""SeqStats -> FLOPs: the cost of training on packed sequences, and the peaks of devices."""

from lightning_thd.flops.model import FlopsModel, Member, join
from lightning_thd.flops.peaks import measure_flops, peak_flops
from lightning_thd.flops.rates import throughput
from lightning_thd.flops.terms import FlopsBreakdown
from lightning_thd.stats import Blocks, Chunk, SeqStats

from_module = FlopsModel.from_module

__all__ = [
    "Blocks",
    "Chunk",
    "FlopsBreakdown",
    "FlopsModel",
    "Member",
    "SeqStats",
    "from_module",
    "join",
    "measure_flops",
    "peak_flops",
    "throughput",
]
