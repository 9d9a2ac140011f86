"""Lightning callbacks: throughput of packed training, and the metric behind it."""

from lightning_thd.callbacks.experts import ExpertBias
from lightning_thd.callbacks.flops_metric import THDFlops
from lightning_thd.callbacks.monitor import THDThroughputMonitor
from lightning_thd.callbacks.packing_check import PackingCheck

__all__ = ["ExpertBias", "PackingCheck", "THDFlops", "THDThroughputMonitor"]
