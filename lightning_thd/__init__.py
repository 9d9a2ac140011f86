"""Packed (THD, cu_seqlens) training for PyTorch Lightning, Accelerate and transformers.

Names are imported when they are first used. The monitor, FLOPs and lengths load only themselves. Every other
name first registers ``attn_implementation="thd"`` with transformers, and loads the classes that LightningCLI
knows by their short names.
"""

import importlib
from typing import TYPE_CHECKING

from lightning_thd._lazy import lazy_face
from lightning_thd._strategy_names import register_strategy_names

if TYPE_CHECKING:
    from lightning_thd.attention import varlen_attention
    from lightning_thd.batch import THDBatch
    from lightning_thd.callbacks import THDThroughputMonitor
    from lightning_thd.callbacks.cuda_graph import CUDAGraphCallback
    from lightning_thd.data import THDDataModule
    from lightning_thd.flops import FlopsModel
    from lightning_thd.integrations import prepare_thd
    from lightning_thd.loss import causal_lm_loss
    from lightning_thd.models import check_packing
    from lightning_thd.packing import Packs, Sequences
    from lightning_thd.strategies import THDDDPStrategy, THDModelParallelStrategy, THDStrategyMixin

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

_PLACES = {
    "CUDAGraphCallback": "lightning_thd.callbacks.cuda_graph",
    "FlopsModel": "lightning_thd.flops",
    "Packs": "lightning_thd.packing",
    "Sequences": "lightning_thd.packing",
    "THDBatch": "lightning_thd.batch",
    "THDDDPStrategy": "lightning_thd.strategies",
    "THDDataModule": "lightning_thd.data",
    "THDModelParallelStrategy": "lightning_thd.strategies",
    "THDStrategyMixin": "lightning_thd.strategies",
    "THDThroughputMonitor": "lightning_thd.callbacks",
    "causal_lm_loss": "lightning_thd.loss",
    "check_packing": "lightning_thd.models",
    "prepare_thd": "lightning_thd.integrations",
    "varlen_attention": "lightning_thd.attention",
}
_SUBMODULES = (
    "alignment",
    "attention",
    "batch",
    "boundaries",
    "callbacks",
    "cli",
    "cuda_graph",
    "data",
    "flops",
    "integrations",
    "loss",
    "models",
    "module",
    "packing",
    "parallel",
    "precision",
    "report",
    "segments",
    "seqlens",
    "stats",
    "strategies",
    "warnings",
)
# These measure and count, in runs that may have no packs at all.
_LIGHT = {"FlopsModel", "THDThroughputMonitor", "alignment", "callbacks", "cli", "flops", "report"}
_LIGHT |= {"segments", "seqlens", "stats", "warnings"}


def _register(name: str) -> None:
    """Fill the registries of transformers, and of LightningCLI's short names, before a name is used."""
    if name in _LIGHT:
        return
    for module in ("models", "data", "strategies", "callbacks.packing_check", "callbacks.cuda_graph"):
        importlib.import_module(f"{__name__}.{module}")


if not TYPE_CHECKING:  # a type checker then still reports names that do not exist
    __getattr__, __dir__ = lazy_face(
        __name__,
        {**_PLACES, **{name: f"{__name__}.{name}" for name in _SUBMODULES}},
        before=_register,
    )
register_strategy_names()
