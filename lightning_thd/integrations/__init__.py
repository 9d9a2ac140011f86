"""Packed training outside the Lightning Trainer: Accelerate, the Hugging Face Trainer, Fabric."""

from lightning_thd.integrations.accelerate import prepare_thd
from lightning_thd.integrations.fabric import prepare_fabric
from lightning_thd.integrations.hf_trainer import packed_trainer
from lightning_thd.integrations.packed_loop import PackedLoop

__all__ = ["PackedLoop", "packed_trainer", "prepare_fabric", "prepare_thd"]
