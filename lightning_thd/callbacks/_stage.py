"""Microbatches of one running stage (train, validate, ...) -> metrics by key, once an interval."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_thd.callbacks._gather import gather_ints
from lightning_thd.callbacks._meter import Interval, Meter, interval
from lightning_thd.callbacks.flops_metric import THDFlops
from lightning_thd.flops.measure import synchronize
from lightning_thd.flops.model import FlopsModel
from lightning_thd.flops.rates import Work, count, packing, throughput


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What a stage runs on.

    Attributes:
        model: counts FLOPs; None when they are not known.
        peak: dense FLOP/s of this rank's device, None when not known.
        group: data-parallel process group, None for the world.
        device: of this rank.
        wire: where tensors of a collective must lie.
        devices: of the whole job.
    """

    model: FlopsModel | None
    peak: float | None
    group: Any
    device: torch.device
    wire: torch.device
    devices: int


class Stage:
    """Counts a stage and turns every interval into metrics.

    Args:
        name: prefix of the keys.
        work: a training step, or a forward pass only.
        clock: returns seconds.
    """

    def __init__(self, name: str, work: Work, clock: Callable[[], float]) -> None:
        self.name = name
        self.work = work
        self.meter = Meter(clock)
        self.metric: THDFlops | None = None
        self.totals = {"time": 0.0, "batches": 0.0, "samples": 0.0, "lengths": 0.0}
        self.rated = False
        self._open: Interval | None = None
        self._seconds = 0.0

    def resume(self, setting: Setting) -> None:
        """Let time count from now on."""
        if not self.meter.running:
            synchronize(setting.device)
            self.meter.start()

    def pause(self, setting: Setting) -> bool:
        """Let time pass uncounted, once the device has done what it was asked; whether it was counting."""
        running = self.meter.running
        if running:
            synchronize(setting.device)
            self.meter.stop()
        return running

    def leave_out(self, setting: Setting) -> None:
        """Take the steps of the running interval out of the rates."""
        synchronize(setting.device)
        self.meter.leave_out()

    def reduce(self, setting: Setting) -> None:
        """Add up what all ranks counted since the last time: one collective, one read."""
        vector = self.meter.flush(setting.model, work=self.work, peak=setting.peak)
        rows = gather_ints(vector, group=setting.group, device=setting.wire)
        if len(rows) == 1:
            synchronize(setting.device)  # with several ranks the read has waited already
        found = interval(rows, setting.model)
        seconds = self.meter.lap()
        self._seconds += seconds
        everything = found.measured + found.left_out
        self.totals["time"] += seconds
        self.totals["batches"] += found.microbatches + found.left_out_microbatches
        self.totals["samples"] += everything.sequences
        self.totals["lengths"] += everything.slots
        self._open = found if self._open is None else self._open + found
        if setting.model is not None:
            flops = count(setting.model, everything, work=self.work)
            self._total_of(setting.model).add_total(flops)

    def close(self, setting: Setting, *, last: bool = False) -> dict[str, float]:
        """Reduce, and report the interval.

        Args:
            setting: what the stage runs on.
            last: nothing follows; if no rate was ever reported, warm-up steps are better than none.

        Returns:
            Values by key, the stage's prefix included; nothing when nothing was counted.
        """
        self.reduce(setting)
        if (found := self._open) is None or not found.microbatches + found.left_out_microbatches:
            return {}
        everything = found.measured + found.left_out
        seconds, measured, microbatches = self._seconds, found.measured, found.microbatches
        if last and not self.rated and not microbatches:
            seconds = self.meter.left_out_seconds
            self.totals["time"] += seconds
            measured, microbatches = everything, found.left_out_microbatches
        self._open, self._seconds = None, 0.0
        flops = None if setting.model is None else count(setting.model, everything, work=self.work)
        metrics = packing(everything, flops)
        if found.mean:
            metrics["packing/imbalance"] = found.heaviest / found.mean
        if microbatches and seconds > 0:
            metrics |= throughput(
                measured,
                seconds=seconds,
                model=setting.model,
                work=self.work,
                microbatches=microbatches,
                devices=setting.devices,
                peak=found.peak,
            )
            self.rated = True
        metrics |= self.totals
        if self.metric is not None:
            metrics["total_flops"] = float(self.metric.breakdown().model)
        return {f"{self.name}/{key}": value for key, value in metrics.items()}

    def state(self) -> dict[str, Any]:
        """Totals, for a checkpoint."""
        return {"totals": dict(self.totals), "flops": self.metric.get_extra_state() if self.metric else None}

    def load(self, state: dict[str, Any], model: FlopsModel | None) -> None:
        """Take the totals of a checkpoint."""
        self.totals = {name: float(value) for name, value in state["totals"].items()}
        if model is not None and state["flops"] is not None:
            self._total_of(model).set_extra_state(state["flops"])

    def _total_of(self, model: FlopsModel) -> THDFlops:
        if self.metric is None:
            self.metric = THDFlops(model, work=self.work)
        self.metric.model = model
        return self.metric
