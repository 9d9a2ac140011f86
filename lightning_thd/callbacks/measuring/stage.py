"""Microbatches of one running stage (train, validate, ...) -> metrics by key, once an interval."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_thd.callbacks.flops_metric import THDFlops
from lightning_thd.callbacks.measuring.across_ranks import communication_device, gather_ints
from lightning_thd.callbacks.measuring.device_peak import (
    LowPrecision,
    compute_dtype,
    low_precision,
    resolve_peak,
)
from lightning_thd.callbacks.measuring.interval import Interval, Meter, interval
from lightning_thd.flops.breakdown import FlopsBreakdown
from lightning_thd.flops.measure import synchronize
from lightning_thd.flops.model import FlopsModel
from lightning_thd.flops.rates import Work, count, packing, rates

_NOTHING = FlopsBreakdown()


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The device, process group, peak and FLOPs model that a stage is measured with.

    Attributes:
        model: counts FLOPs; None when they are not known.
        peak: dense FLOP/s of this rank's device, None when not known.
        group: data-parallel process group, None for the world.
        device: of this rank.
        wire: where tensors of a collective must lie.
        ranks: that hold different sequences.
        devices: of the whole job.
        low: what runs in FP8 or FP4; ``peak`` is that of bf16 then.
    """

    model: FlopsModel | None
    peak: float | None
    group: Any
    device: torch.device
    wire: torch.device
    ranks: int
    devices: int
    low: LowPrecision | None = None

    @classmethod
    def of(
        cls, module: nn.Module, device: torch.device, peak: str | float, precision: Any, **others: Any
    ) -> Setting:
        """Fill in a device's peak in the dtype of ``precision.precision`` for a module, and the rest."""
        low = low_precision(module, device, peak)
        found = resolve_peak(peak, device, torch.bfloat16 if low else compute_dtype(precision, module))
        wire = communication_device(others["group"], device)
        return cls(peak=found, low=low, device=device, wire=wire, **others)


class Stage:
    """Counts the work of one stage and turns every interval into metrics."""

    def __init__(self, name: str, work: Work, clock: Callable[[], float]) -> None:
        self.name = name
        self.work = work
        self.meter = Meter(clock)
        self.metric: THDFlops | None = None
        self.totals = {"time": 0.0, "batches": 0.0, "samples": 0.0, "lengths": 0.0}
        self.rated = False
        self._open: Interval | None = None
        self._flops = [_NOTHING, _NOTHING]  # of what was measured, and of what was left out
        self._seconds = 0.0

    def resume(self, setting: Setting) -> None:
        """Start the clock of this stage."""
        if not self.meter.running:
            synchronize(setting.device)
            self.meter.start()

    def pause(self, setting: Setting) -> bool:
        """Stop the clock once the device is idle, and return whether it was running."""
        running = self.meter.running
        if running:
            synchronize(setting.device)
            self.meter.stop()
        return running

    def leave_out(self, setting: Setting) -> None:
        """Exclude the steps of the running interval from the rates."""
        synchronize(setting.device)
        self.meter.leave_out()

    def reduce(self, setting: Setting, *, whole: bool = False) -> None:
        """Add up the counts of all ranks since the last reduction: one collective, one read.

        Args:
            setting: what the stage runs on.
            whole: leave out the running step, which a job that resumes from here runs again.
        """
        vector = self.meter.flush(
            setting.model, work=self.work, peak=setting.peak, per_step=setting.ranks > 1, whole=whole
        )
        rows = gather_ints(vector, group=setting.group, device=setting.wire)
        if setting.ranks == 1:
            synchronize(setting.device)  # with several ranks the read has waited already
        found, seconds = interval(rows, setting.model), self.meter.lap(whole=whole)
        if found.own_seconds is not None:
            seconds = found.own_seconds
        self._seconds += seconds
        self.totals["time"] += seconds
        self.totals["batches"] += found.microbatches + found.left_out_microbatches
        self.totals["samples"] += found.measured.sequences + found.left_out.sequences
        self.totals["lengths"] += found.measured.slots + found.left_out.slots
        self._open = found if self._open is None else self._open + found
        if setting.model is not None:
            total = measured = count(setting.model, found.measured, work=self.work)
            if found.left_out_microbatches:
                left_out = count(setting.model, found.left_out, work=self.work)
                self._flops[1] += left_out
                total = measured + left_out
            self._flops[0] = measured if self._flops[0] is _NOTHING else self._flops[0] + measured
            self._total_of(setting.model).add_total(total)

    def close(self, setting: Setting, *, last: bool = False) -> dict[str, float]:
        """Reduce the running interval over the ranks and return its metrics; a collective.

        Args:
            setting: what the stage runs on.
            last: nothing follows; if no rate was ever reported, warm-up steps are better than none.

        Returns:
            Values by key, the stage's prefix included; nothing when nothing was counted.
        """
        self.reduce(setting)
        if (found := self._open) is None or not found.microbatches + found.left_out_microbatches:
            return {}
        measured, left_out = self._flops if setting.model is not None else (None, None)
        everything = found.measured + found.left_out if found.left_out_microbatches else found.measured
        all_flops = None if measured is None or left_out is None else measured + left_out
        metrics = packing(everything, all_flops)
        metrics["packing/imbalance"] = found.heaviest / found.mean if found.mean else 1.0
        stats, flops, seconds, microbatches = found.measured, measured, self._seconds, found.microbatches
        if last and not self.rated and not microbatches:
            stats, flops, microbatches = everything, all_flops, found.left_out_microbatches
            seconds = self.meter.left_out_seconds
            self.totals["time"] += seconds
        if microbatches and seconds > 0:
            metrics |= rates(
                stats,
                flops,
                seconds=seconds,
                microbatches=microbatches,
                devices=setting.devices,
                peak=_peak(found.peak, flops, setting.low),
            )
            self.rated = True
        self._open, self._seconds, self._flops = None, 0.0, [_NOTHING, _NOTHING]
        metrics |= self.totals
        if self.metric is not None:
            metrics["total_flops"] = self.metric.folded
        return {f"{self.name}/{key}": value for key, value in metrics.items()}

    def state(self) -> dict[str, Any]:
        """Return the totals for a checkpoint."""
        return {"totals": dict(self.totals), "flops": self.metric.get_extra_state() if self.metric else None}

    def load(self, state: dict[str, Any], model: FlopsModel | None) -> None:
        """Restore the totals from a checkpoint."""
        self.totals = {name: float(value) for name, value in state["totals"].items()}
        if model is not None and state["flops"] is not None:
            self._total_of(model).set_extra_state(state["flops"])

    def _total_of(self, model: FlopsModel) -> THDFlops:
        if self.metric is None:
            self.metric = THDFlops(model, work=self.work)
        if self.metric.model is not model:
            self.metric.model = model
        return self.metric


def _peak(peak: float | None, flops: FlopsBreakdown | None, low: LowPrecision | None) -> float | None:
    return peak if peak is None or flops is None or low is None else low.peak(peak, flops)
