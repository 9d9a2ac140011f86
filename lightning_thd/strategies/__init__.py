"""Optimizer steps over packed batches under Lightning: a mixin, and ready strategies."""

from lightning_thd.strategies.mixin import THDStrategyMixin
from lightning_thd.strategies.ready import (
    THDDDPStrategy,
    THDModelParallelStrategy,
    THDSingleDeviceStrategy,
    register_strategies,
)

__all__ = [
    "THDDDPStrategy",
    "THDModelParallelStrategy",
    "THDSingleDeviceStrategy",
    "THDStrategyMixin",
    "register_strategies",
]
