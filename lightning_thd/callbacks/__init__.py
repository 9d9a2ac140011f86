"""Lightning callbacks: throughput of packed training, the leak probe, biases of experts."""

from lightning_thd.callbacks.experts import ExpertBias
from lightning_thd.callbacks.monitor import THDThroughputMonitor
from lightning_thd.callbacks.packing_check import PackingCheck

__all__ = ["ExpertBias", "PackingCheck", "THDThroughputMonitor"]
