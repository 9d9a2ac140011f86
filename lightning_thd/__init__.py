"""Packed (THD, cu_seqlens) training for PyTorch Lightning, Accelerate and transformers."""

from lightning_thd.attention import varlen_attention
from lightning_thd.batch import THDBatch
from lightning_thd.callbacks import THDThroughputMonitor
from lightning_thd.callbacks.cuda_graph import CUDAGraphCallback
from lightning_thd.data import THDDataModule
from lightning_thd.flops import FlopsModel
from lightning_thd.integrations import prepare_thd
from lightning_thd.loss import causal_lm_loss
from lightning_thd.models import check_packing, register_thd
from lightning_thd.packing import Packs, Sequences
from lightning_thd.strategies import (
    THDDDPStrategy,
    THDModelParallelStrategy,
    THDStrategyMixin,
    register_strategies,
)

__version__ = "0.1.0"

__all__ = [
    "CUDAGraphCallback",
    "FlopsModel",
    "Packs",
    "Sequences",
    "THDBatch",
    "THDDDPStrategy",
    "THDDataModule",
    "THDModelParallelStrategy",
    "THDStrategyMixin",
    "THDThroughputMonitor",
    "causal_lm_loss",
    "check_packing",
    "prepare_thd",
    "varlen_attention",
]

register_thd()
register_strategies()
