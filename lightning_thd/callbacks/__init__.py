"""Lightning callbacks that measure throughput, check for leaks and balance experts, and a metric of FLOPs."""

from lightning_thd.callbacks.experts import ExpertBias
from lightning_thd.callbacks.flops_metric import THDFlops
from lightning_thd.callbacks.monitor import THDThroughputMonitor
from lightning_thd.callbacks.packing_check import PackingCheck

__all__ = ["ExpertBias", "PackingCheck", "THDFlops", "THDThroughputMonitor"]
