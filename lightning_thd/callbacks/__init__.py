"""Lightning callbacks: throughput of packed training, and the metric behind it."""

from lightning_thd.callbacks.flops_metric import THDFlops
from lightning_thd.callbacks.packing_check import PackingCheck
from lightning_thd.callbacks.throughput import THDThroughputMonitor

__all__ = ["PackingCheck", "THDFlops", "THDThroughputMonitor"]
