"""Lightning callbacks that measure throughput, check for leaks and balance experts, and a metric of FLOPs."""

from typing import TYPE_CHECKING

from lightning_thd._lazy import lazy_face

if TYPE_CHECKING:
    from lightning_thd.callbacks.experts import ExpertBias
    from lightning_thd.callbacks.flops_metric import THDFlops
    from lightning_thd.callbacks.monitor import THDThroughputMonitor
    from lightning_thd.callbacks.packing_check import PackingCheck

__all__ = [
    "ExpertBias",
    "PackingCheck",
    "THDFlops",
    "THDThroughputMonitor",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_face(
        __name__,
        {
            "ExpertBias": "lightning_thd.callbacks.experts",
            "THDFlops": "lightning_thd.callbacks.flops_metric",
            "THDThroughputMonitor": "lightning_thd.callbacks.monitor",
            "PackingCheck": "lightning_thd.callbacks.packing_check",
        },
    )
