"""Packed training outside the Lightning Trainer: Accelerate, the Hugging Face Trainer, Fabric."""

from typing import TYPE_CHECKING, Any

from lightning_thd.integrations.accelerate import prepare_accelerate, prepare_thd
from lightning_thd.integrations.fabric import prepare_fabric
from lightning_thd.integrations.hf_trainer import packed_trainer
from lightning_thd.integrations.packed_loop import PackedLoop

if TYPE_CHECKING:
    from lightning_thd.integrations.hf_callback import ThroughputCallback

__all__ = [
    "PackedLoop",
    "ThroughputCallback",
    "packed_trainer",
    "prepare_accelerate",
    "prepare_fabric",
    "prepare_thd",
]


def __getattr__(name: str) -> Any:
    """Import ``ThroughputCallback``, which needs transformers, at its first use."""
    if name == "ThroughputCallback":
        from lightning_thd.integrations.hf_callback import ThroughputCallback

        return ThroughputCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
