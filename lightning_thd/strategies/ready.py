"""Lightning's strategies with the step loop of ours: "thd" on one device, "thd_ddp" on several."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_thd.strategies.mixin import THDStrategyMixin


class THDSingleDeviceStrategy(THDStrategyMixin, SingleDeviceStrategy):
    """``Trainer(strategy="thd")``: one device, steps of varying microbatches.

    Args:
        device: the device; the first one the Trainer's ``accelerator`` and ``devices`` choose, by default.
        kwargs: those of Lightning's ``SingleDeviceStrategy``.
    """

    strategy_name = "thd"

    def __init__(self, device: torch.device | str | None = None, **kwargs: Any) -> None:
        super().__init__(device=device or "cpu", **kwargs)
        self._chosen = [torch.device(device)] if device is not None else []

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The device, once it is chosen; Lightning asks and sets this name."""
        return self._chosen

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices and len(devices) > 1:
            raise MisconfigurationException(
                f"strategy='thd' runs on one device, but the Trainer has {len(devices)}. "
                "Use strategy='thd_ddp', or Trainer(devices=1)."
            )
        self._chosen = list(devices or [])
        if devices:
            self._root_device = torch.device(devices[0])


class THDDDPStrategy(THDStrategyMixin, DDPStrategy):
    """``Trainer(strategy="thd_ddp")``: replicated parameters, steps of varying microbatches on every rank.

    Arguments are those of Lightning's ``DDPStrategy``.
    """

    strategy_name = "thd_ddp"


def register_strategies() -> None:
    """Make the names known to ``Trainer(strategy=...)``; ``import lightning_thd`` calls it."""
    for strategy in (THDSingleDeviceStrategy, THDDDPStrategy):
        if strategy.strategy_name not in StrategyRegistry:
            StrategyRegistry.register(strategy.strategy_name, strategy, description=strategy.__doc__ or "")
