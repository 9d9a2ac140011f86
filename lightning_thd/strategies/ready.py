"""Lightning's strategies with this package's step loop: "thd" on one device, "thd_ddp" on several."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_thd._checks import flags, instance
from lightning_thd.alignment import Layout
from lightning_thd.parallel.context.costs import CommCosts
from lightning_thd.parallel.context.layout import Communication
from lightning_thd.parallel.fsdp import models_of, trains_towers
from lightning_thd.strategies.dynamic import check_degrees, check_ways
from lightning_thd.strategies.mixin import THDStrategyMixin
from lightning_thd.strategies.model_parallel import THDModelParallelStrategy


class THDSingleDeviceStrategy(THDStrategyMixin, SingleDeviceStrategy):
    """``Trainer(strategy="thd")``: one device, steps of varying microbatches.

    Args:
        device: the device; the first one the Trainer's ``accelerator`` and ``devices`` choose, by default.
        kwargs: those of Lightning's ``SingleDeviceStrategy``.
    """

    strategy_name = "thd"

    def __init__(self, device: torch.device | str | None = None, **kwargs: Any) -> None:
        if device is not None:
            instance(device, "device", torch.device, str, advice="Pass 'cpu' or 'cuda:0'.")
            try:
                device = torch.device(device)
            except RuntimeError as err:
                raise ValueError(f"device={device!r} is unknown to torch. Pass 'cpu' or 'cuda:0'.") from err
        super().__init__(device=device or "cpu", **kwargs)
        self._chosen = [device] if device is not None else []

    @property
    def parallel_devices(self) -> list[torch.device]:
        """Return the one chosen device as a list, which Lightning reads and sets."""
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

    Args:
        context_parallel_size: ranks that share the slots of a pack; the others read different data.
            ``dynamic`` chooses 1, 2, 4, ... ranks for every microbatch: long sequences are shared, short ones
            stay whole. ``THDDataModule(capacity=...)`` then is what one rank holds, a pack of ``Packs(n)``
            what the largest group does.
        max_context_parallel_size: most ranks that share a sequence under ``dynamic``, a power of two.
        context_parallel_layout: ``dual_chunk`` gives ranks equal work; ``contiguous`` pads nothing between
            sequences; ``striped`` does both, with one kernel call a rank of the group; ``mixed`` cuts long
            sequences as ``dual_chunk`` and keeps short ones whole, so that few keys travel.
        context_parallel_communication: what attention exchanges: ``all_gather`` all keys and values,
            ``needed`` those that some query sees, ``ring`` these one rank after the other, ``ulysses`` rows
            for heads; ``auto`` takes what ``context_parallel_costs`` make the cheapest, layer by layer.
        context_parallel_costs: bandwidth, latency and FLOP rate; None is those of one node of H100s, and
            ``measure`` times the link when the job starts.
        broadcast_data: one rank reads for all that share its data.
        check_plans: compare what ranks are about to run at every batch.
        kwargs: those of Lightning's ``DDPStrategy``.
    """

    strategy_name = "thd_ddp"

    def __init__(
        self,
        *,
        context_parallel_size: int | Literal["dynamic"] = 1,
        max_context_parallel_size: int | None = None,
        context_parallel_layout: Layout = "dual_chunk",
        context_parallel_communication: Communication = "auto",
        context_parallel_costs: CommCosts | Literal["measure"] | None = None,
        broadcast_data: bool = False,
        check_plans: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_degrees(context_parallel_size, max_context_parallel_size)
        check_ways(context_parallel_layout, context_parallel_communication, context_parallel_costs)
        flags(broadcast_data=broadcast_data, check_plans=check_plans)
        self.context_parallel_size = context_parallel_size
        self.max_context_parallel_size = max_context_parallel_size
        self.context_parallel_layout = context_parallel_layout
        self.context_parallel_communication = context_parallel_communication
        self.context_parallel_costs = context_parallel_costs
        self.broadcast_data, self.check_plans = broadcast_data, check_plans

    def configure_ddp(self) -> None:
        """Wrap the model in DDP, which then tolerates a vision tower unused on ranks whose packs are text."""
        assert self.lightning_module is not None
        if any(map(trains_towers, models_of(self.lightning_module))):
            self._ddp_kwargs.setdefault("find_unused_parameters", True)
        super().configure_ddp()


def register_strategies() -> None:
    """Register the names with Lightning's ``Trainer(strategy=...)``; ``import lightning_thd`` calls it."""
    for strategy in (THDSingleDeviceStrategy, THDDDPStrategy, THDModelParallelStrategy):
        if strategy.strategy_name not in StrategyRegistry:
            StrategyRegistry.register(strategy.strategy_name, strategy, description=strategy.__doc__ or "")
