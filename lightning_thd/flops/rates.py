"""Counts, FLOPs and seconds -> rates, under the names of Lightning's ThroughputMonitor and a few more."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

from lightning_thd._checks import choice, real_number, whole_number
from lightning_thd.flops.model import FlopsModel
from lightning_thd.flops.terms import FlopsBreakdown, Recompute
from lightning_thd.stats import SeqStats

Work: TypeAlias = Literal["training", "forward"]


def throughput(
    stats: SeqStats,
    *,
    seconds: float,
    model: FlopsModel | None = None,
    work: Work = "training",
    recompute: Recompute | None = None,
    microbatches: int | None = None,
    devices: int = 1,
    peak: float | None = None,
) -> dict[str, float]:
    """Return the throughput, MFU and HFU of some steps, for any training loop.

    Args:
        stats: the counts of the sequences, over all data-parallel ranks.
        seconds: how long the work took.
        model: the model that counts FLOPs; None leaves their keys out.
        work: "training" for forward and backward passes, or "forward".
        recompute: the policy of activation checkpointing; None uses the one of ``model``.
        microbatches: their number over all ranks; None leaves out ``device/batches_per_sec``.
        devices: the number of devices, including context-, tensor- and pipeline-parallel ones.
        peak: dense FLOP/s of one device; None leaves MFU and HFU out.

    Returns:
        The values of ``device/flops_per_sec``, ``device/tflops_per_gpu``, ``device/mfu``, ``device/hfu``,
        ``device/items_per_sec`` (slots), ``device/real_items_per_sec`` (tokens of all sequences),
        ``device/samples_per_sec`` (sequences), ``device/batches_per_sec`` (microbatches), ``packing/fill``,
        ``packing/shared``, ``packing/attention_fraction``. Sums over devices lack ``device/``.
    """
    passed = "Read the clock before and after: a rate needs time that has passed."
    seconds = real_number(seconds, "seconds", above=0, advice=passed)
    check_peak(peak)
    choice(work, "work", *get_args(Work))
    devices = whole_number(devices, "devices", least=1, advice="It is the number that did the work.")
    if microbatches is not None:
        microbatches = whole_number(microbatches, "microbatches", advice="None leaves their rate out.")
    flops = None if model is None else count(model, stats, work=work, recompute=recompute)
    of_time = rates(stats, flops, seconds=seconds, microbatches=microbatches, devices=devices, peak=peak)
    return of_time | packing(stats, flops)


def rates(
    stats: SeqStats,
    flops: FlopsBreakdown | None,
    *,
    seconds: float,
    microbatches: int | None = None,
    devices: int = 1,
    peak: float | None = None,
) -> dict[str, float]:
    """Return the metrics that depend on time: rates, MFU, HFU. ``flops=None`` leaves out keys of FLOPs."""
    totals = {
        "items": float(stats.slots),
        "real_items": float(stats.real_tokens + stats.shared_tokens),
        "samples": float(stats.sequences),
    }
    if microbatches is not None:
        totals["batches"] = float(microbatches)
    if flops is not None:
        totals["flops"] = float(flops.model)

    metrics = {f"device/{name}_per_sec": total / seconds / devices for name, total in totals.items()}
    if flops is not None:
        metrics["device/tflops_per_gpu"] = flops.model / seconds / devices / 1e12
        if peak is not None:
            metrics["device/mfu"] = flops.model / seconds / devices / peak
            metrics["device/hfu"] = flops.hardware / seconds / devices / peak
    if devices > 1:
        metrics |= {f"{name}_per_sec": total / seconds for name, total in totals.items()}
    return metrics


def count(
    model: FlopsModel, stats: SeqStats, *, work: Work, recompute: Recompute | None = None
) -> FlopsBreakdown:
    """Return the FLOPs of ``work`` on ``stats``."""
    if work == "forward":
        return model.forward_flops(stats)
    return model.training_flops(stats, recompute=recompute)


def packing(stats: SeqStats, flops: FlopsBreakdown | None) -> dict[str, float]:
    """Return how full the packs are, and the shares of shared tokens and of attention FLOPs."""
    ratios = {}
    if stats.slots:
        ratios["packing/fill"] = stats.real_tokens / stats.slots
    if stats.shared_tokens:
        ratios["packing/shared"] = stats.shared_tokens / (stats.real_tokens + stats.shared_tokens)
    if flops is not None and flops.model:
        ratios["packing/attention_fraction"] = flops.attention / flops.model
    return ratios


def check_peak(peak: object, *, named: bool = False) -> None:
    """Refuse a peak other than None or a positive, finite number; ``named`` allows "auto" and "measure"."""
    if named and isinstance(peak, str) and peak in ("auto", "measure"):
        return
    if peak is None:
        return
    if isinstance(peak, int | float) and not isinstance(peak, bool) and 0 < peak < math.inf:
        return
    others = "or what measure_flops() returns"
    if named:
        others = "'measure' to time matmuls, or 'auto' to look the device up"
    raise ValueError(
        f"peak={peak!r} is not a device's dense FLOP/s. Give a positive number, such as 989.4e12 for an "
        f"H100 in bf16, {others}."
    )
