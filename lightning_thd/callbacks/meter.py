"""Batches and clock readings of a stage (train, validate, ...) -> metrics by key, once per interval.

For each microbatch, the meter only stores counts and lengths; those of padded rows stay on the device. All
other work happens once per interval or checkpoint, including collectives and device reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from operator import attrgetter
from typing import Any, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_thd._find import recipe_of
from lightning_thd._pages import see
from lightning_thd.callbacks.experts import ExpertChoices
from lightning_thd.callbacks.module_flops import ModuleFlops
from lightning_thd.callbacks.seen import Dense, OnHost, Rows, Seen, microbatches, resolve
from lightning_thd.flops.listen import AttentionCall
from lightning_thd.flops.model import FlopsModel, from_ints, num_ints
from lightning_thd.flops.pairs import AttentionPattern, flops_of_calls
from lightning_thd.flops.peaks import device_name, measure_flops, peak_flops, synchronize
from lightning_thd.flops.rates import Work, count, packing, rates
from lightning_thd.flops.terms import COLUMNS, FlopsBreakdown
from lightning_thd.parallel.across_ranks import communication_device, gather_ints, group_size
from lightning_thd.precision.report import fp8_share
from lightning_thd.stats import COUNTS, IntArray, SeqStats, Window, combine, window_pairs
from lightning_thd.warnings import MeasureWarning, warn

FloatArray: TypeAlias = npt.NDArray[np.float64]
# A microbatch's stats and its lengths on the host.
_Resolved: TypeAlias = tuple[SeqStats, OnHost | None]

_BASE = attrgetter(*COUNTS)
_CPU = torch.device("cpu")
_OF_MODEL_FLOPS = (
    "device/mfu",
    "device/tflops_per_gpu",
    "device/flops_per_sec",
    "flops_per_sec",
    "packing/attention_fraction",
)
_OF_REAL_TOKENS = ("packing/fill", "packing/attention_fraction", "device/real_items_per_sec")
# An interval's steps are combined into at most this many sums of work, so that ranks gather few numbers.
_BINS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class LowPrecision:
    """The share of linear FLOPs in FP8 or FP4, and the ratio of the FP8 or FP4 peak to the bf16 peak."""

    shares: dict[Work, float]
    ratio: float

    def peak(self, peak: float, flops: FlopsBreakdown, work: Work) -> float:
        """Return the FLOP/s of a device that runs the low-precision part and the rest at their own peaks."""
        if not flops.model:
            return peak

        # The time of both parts, in units of 1 / peak: the low-precision part runs ``ratio`` times as fast.
        low = self.shares[work] * flops.linear
        return peak * flops.model / (low / self.ratio + flops.model - low)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """The hardware of a measured run: this rank's device, the size of ``group`` and the number of devices."""

    device: torch.device = _CPU
    peak: float | None = None  # dense FLOP/s of this rank's device, in bf16 if ``low`` is given
    low: LowPrecision | None = None  # the share that runs in FP8 or FP4
    group: Any = None  # the process group of ranks with different sequences; None means all ranks
    ranks: int = 1
    devices: int = 1

    @classmethod
    def of(
        cls, module: nn.Module, device: torch.device, peak: str | float, precision: str, **job: Any
    ) -> Hardware:
        """Look up the peak for a module and a precision; ``job`` has the group and the number of devices."""
        low = low_precision(module, device, peak)
        dtype = torch.bfloat16 if low else compute_dtype(precision, module)
        flops_per_s = resolve_peak(peak, device, dtype)
        return cls(device=device, peak=flops_per_s, low=low, ranks=group_size(job.get("group")), **job)


@dataclass(frozen=True, slots=True)
class Counted:
    """The counts of some microbatches over all ranks, and their FLOPs (None if unknown)."""

    stats: SeqStats
    microbatches: int
    flops: FlopsBreakdown | None

    def __add__(self, other: Counted) -> Counted:
        # Nothing counted has unknown FLOPs too, and must not make those of the other side unknown.
        if not other.microbatches and self.microbatches:
            return self
        if not self.microbatches:
            return other

        flops = None if self.flops is None or other.flops is None else self.flops + other.flops
        return Counted(self.stats + other.stats, self.microbatches + other.microbatches, flops)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """The counts of all ranks between two reductions; steps that the rates leave out are separate."""

    measured: Counted
    left_out: Counted
    seconds: float  # time of the measured steps
    peak: float | None  # mean dense FLOP/s of a device; None if it is unknown on a rank
    heaviest: float  # largest work of a rank in a group of steps (see _BINS), summed over the groups
    mean: float  # mean work of the ranks, summed over the steps
    unknown_slots: int = 0  # slots of rows whose padding is unknown, counted as real tokens
    padded_real: int = 0  # real tokens of the rows whose padding is known
    padded_slots: int = 0  # slots of the rows whose padding is known
    room: int = 0  # the capacity of the packs, plus the slots of padded rows
    hides_pairs: int = 0  # above 0 if the FLOPs hold pairs of slots that no sequence has

    def __add__(self, other: Interval) -> Interval:
        names = [each.name for each in fields(self) if each.name != "peak"]
        sums: Any = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Interval(**sums, peak=other.peak)


@dataclass(frozen=True, slots=True)
class _Step:
    """What a step ran beyond the counts of its microbatches; see ``Meter.add`` and ``Meter.end_step``."""

    microbatches: int
    calls: list[AttentionCall]
    products: tuple[int, int, int] | None


class Meter:
    """Counts the microbatches and the time of one stage, and reduces them over the ranks per interval."""

    def __init__(
        self,
        name: str,
        work: Work,
        clock: Callable[[], float],
        hardware: Hardware | None = None,
        model: FlopsModel | None = None,
    ) -> None:
        self.name = name
        self.work = work
        self.clock = clock
        self.hardware = hardware or Hardware()
        self.model = model

        self.pad_id: int | None = None
        self.experts: ExpertChoices | None = None
        self.capacity = 0  # slots of a full pack; 0 if unknown: fill then divides by the batch's slots
        self.unknown_padding = False  # whether the padding of some rows is unknown
        self.unfilled = False  # whether the last packs had no padding, and their capacity is unknown
        self.padded = [0, 0]  # real tokens and slots of padded rows since this meter was made, over all ranks
        self.pattern: AttentionPattern | None = None  # our attention in a model without a known config

        self.steps: list[list[Seen]] = [[]]  # the microbatches of each step; the last step is running
        self._calls: list[list[AttentionCall]] = [[]]  # those that ``pattern`` leaves out, step by step
        self.hides_pairs = False  # whether the FLOPs of such a model hold pairs that no sequence has
        self._has_hidden = False  # whether those of some rank did at the last reduction
        self._products: list[tuple[int, int, int] | None] = [None]  # those of each step, if they were counted
        self.totals = {"time": 0.0, "batches": 0.0, "samples": 0.0, "lengths": 0.0}
        self._total_flops: dict[str, float] | None = None
        self._left_out: list[Seen] = []  # microbatches that the rates leave out
        self._left_out_steps: list[_Step] = []
        self._left_out_seconds = 0.0  # their time in this interval
        self._seconds = 0.0  # seconds counted before the clock was last started
        self._whole_seconds = 0.0  # the part of the counted seconds that belongs to ended steps

        self._since: float | None = None
        self._interval: Interval | None = None
        self._rated = False  # whether an interval had rates

    def resume(self) -> None:
        """Start the clock once the device is idle."""
        if self._since is None:
            synchronize(self.hardware.device)
            self._since = self.clock()

    def pause(self) -> bool:
        """Stop the clock once the device is idle, and return whether it was running."""
        if self._since is None:
            return False
        synchronize(self.hardware.device)
        self._seconds = self._elapsed()
        self._since = None
        return True

    def use(self, flops: ModuleFlops, stage: str = "train") -> None:
        """Count with the FLOPs that are known of a stage by now."""
        self.model = flops.model(stage)
        self.pattern = flops.pattern
        self.hides_pairs = flops.hides_pairs

    def add(self, batch: Any, calls: Sequence[AttentionCall] = ()) -> int:
        """Count a batch's microbatches in the running step and return their number.

        ``calls`` are its attention calls that ``pattern`` leaves out.
        """
        seen = microbatches(batch, self.pad_id)
        self.steps[-1].extend(seen)
        self._calls[-1].extend(calls)
        return len(seen)

    def end_step(self, products: tuple[int, int, int] | None = None) -> None:
        """End the running step after the optimizer's update, and begin the next.

        ``products`` are its counted FLOPs forward, backward and run again by checkpointing, for models of
        which ``model`` cannot tell.
        """
        self._products[-1] = products
        self._products.append(None)
        self.steps.append([])
        self._calls.append([])
        self._whole_seconds = self._elapsed()

    def last_flops(self) -> int:
        """Return this rank's model FLOPs of the step that ended last; 0 while they are unknown."""
        step = self.steps[-2]
        if self.model is None or not step or self.hides_pairs:
            return 0
        resolved = resolve(step)
        counts = count_table(resolved, self.model).sum(axis=0).tolist()
        by_config = count(self.model, from_ints(counts, self.model), work=self.work).model
        outside = self._extra(resolved, [_Step(len(step), self._calls[-2], self._products[-2])])
        return int(by_config + round(outside[:, :2].sum()))

    def leave_out(self) -> None:
        """Exclude the steps since the last reduction from the rates and the total time, not from counts."""
        synchronize(self.hardware.device)
        self._left_out_steps.extend(self._ended())
        self._left_out.extend(chain.from_iterable(self.steps))
        self.steps = [[]]
        self._calls = [[]]
        self._products = [None]
        self._left_out_seconds += self._lap()

    def reduce(self, *, whole: bool = False) -> None:
        """Add up all ranks' new counts, in a collective; with ``whole``, only those of ended steps."""
        hardware = self.hardware
        synchronize(hardware.device)  # before ``flush`` reads the clock
        wire = communication_device(hardware.group, hardware.device)
        rows = gather_ints(self.flush(whole=whole), group=hardware.group, device=wire)
        new = interval(rows, self.model, self.work, self._lap(whole=whole))
        self._interval = new if self._interval is None else self._interval + new

        everything = new.measured + new.left_out
        self.totals["time"] += new.seconds
        self.totals["batches"] += everything.microbatches
        self.totals["samples"] += everything.stats.sequences
        self.totals["lengths"] += everything.stats.slots
        self.unknown_padding = self.unknown_padding or new.unknown_slots > 0
        self._has_hidden = new.hides_pairs > 0
        self.padded = [self.padded[0] + new.padded_real, self.padded[1] + new.padded_slots]

        flops = everything.flops
        if flops is not None:
            before = self._total_flops or dict.fromkeys(COLUMNS, 0.0)
            self._total_flops = {name: total + getattr(flops, name) for name, total in before.items()}

    def close(self, *, last: bool = False) -> dict[str, float]:
        """Return an interval's metrics over all ranks by key, such as "train/time"; a collective."""
        self.reduce()
        loads = {} if self.experts is None else self.experts.close()
        closed = self._interval
        self._interval = None
        left_out_seconds = self._left_out_seconds
        self._left_out_seconds = 0.0
        if closed is None:
            return {}
        everything = closed.measured + closed.left_out
        if not everything.microbatches:
            return {}

        metrics = packing(everything.stats, everything.flops)
        if closed.room:
            metrics["packing/fill"] = everything.stats.real_tokens / closed.room
        metrics["packing/imbalance"] = closed.heaviest / closed.mean if closed.mean else 1.0

        rated = closed.measured
        seconds = closed.seconds
        if last and not self._rated and not rated.microbatches:  # a run with only left-out steps
            rated = everything
            seconds = left_out_seconds
            self.totals["time"] += seconds
        if rated.microbatches and seconds > 0:
            peak = closed.peak
            low = self.hardware.low
            if peak is not None and rated.flops is not None and low is not None:
                peak = low.peak(peak, rated.flops, self.work)
            metrics |= rates(
                rated.stats,
                rated.flops,
                microbatches=rated.microbatches,
                seconds=seconds,
                devices=self.hardware.devices,
                peak=peak,
            )
            self._rated = True

        if closed.unknown_slots:  # real tokens are unknown, and so is MFU unless the user counts slots
            for key in (*_OF_REAL_TOKENS, "real_items_per_sec"):
                metrics.pop(key, None)
            if self.model is not None and self.model.tokens == "real":
                metrics.pop("device/mfu", None)

        if closed.hides_pairs:  # the device computes these pairs, but no model needs them
            for key in _OF_MODEL_FLOPS:
                metrics.pop(key, None)

        metrics |= loads
        metrics |= self.totals
        if self._total_flops is not None and everything.flops is not None and not self._has_hidden:
            metrics["total_flops"] = sum(self._total_flops.values()) - self._total_flops["recompute"]
        return {f"{self.name}/{key}": value for key, value in metrics.items()}

    def flush(self, *, whole: bool = False) -> list[int]:
        """Return and reset this rank's counts: a list of integers that is equally long on all ranks."""
        running = self.steps.pop() if whole else []
        running_calls = self._calls.pop() if whole else []
        if whole:
            self._products.pop()

        ended = self._ended()
        steps = [step for step in self.steps if step]
        measured = list(chain.from_iterable(steps))
        seen = measured + self._left_out
        model = self.model
        resolved = resolve(seen, model.vision if model is not None and model.sees_images else None)

        # What is not known stays ``Dense``; rows whose lengths were on the device now have them.
        unknown_slots = sum(stats.slots for stats, lengths in resolved if isinstance(lengths, Dense))
        padded = [
            stats
            for (_, before), (stats, lengths) in zip(seen, resolved, strict=True)
            if isinstance(before, Rows) and not isinstance(lengths, Dense)
        ]
        packs = [stats for stats, lengths in seen if not isinstance(lengths, Rows | Dense | None)]
        self.unfilled = bool(packs) and not self.capacity and all(x.slots == x.real_tokens for x in packs)

        table = count_table(resolved, self.model)
        measured_table = table[: len(measured)]
        left_out_table = table[len(measured) :]
        extra = self._extra(resolved, [*ended, *self._left_out_steps])
        extra_of_steps = extra[: len(ended)]
        extra_left_out = extra[len(ended) :]

        works: list[float] = []
        if self.hardware.ranks > 1:
            works = self._works([len(step) for step in steps], measured_table, extra_of_steps)

        # ``interval`` takes this vector apart.
        vector = [
            *measured_table.sum(axis=0).tolist(),
            *left_out_table.sum(axis=0).tolist(),
            len(measured),
            len(self._left_out),
            round(self.hardware.peak or 0),
            round((self._whole_seconds if whole else self._elapsed()) * 1e9),
            unknown_slots,
            sum(stats.real_tokens for stats in padded),
            sum(stats.slots for stats in padded),
            sum(
                stats.slots if isinstance(lengths, Rows | Dense) else max(self.capacity, stats.slots)
                for stats, lengths in seen
            ),
            int(self.hides_pairs),
            # The FLOPs of some steps can exceed int64, so sums are sent as the 64 bits of floats.
            *np.array([*extra_of_steps.sum(0), *extra_left_out.sum(0)]).view(np.int64).tolist(),
            *np.array(works + [0.0] * (_BINS - len(works))).view(np.int64).tolist(),
        ]

        self.steps = [running]
        self._calls = [running_calls]
        self._products = [None]
        self._left_out = []
        self._left_out_steps = []
        return vector

    def _works(self, microbatches: list[int], table: IntArray, extra: FloatArray) -> list[float]:
        """Return this rank's work in each group of neighbouring steps, at most ``_BINS`` of them.

        Args:
            microbatches: their number in each step.
            table: the counts of each microbatch, ``[microbatches, counts]``.
            extra: the FLOPs of each step that ``model`` does not count, ``[steps, 3]``.
        """
        steps = len(microbatches)
        if not steps:
            return []

        size = -(-steps // _BINS)  # steps of a group, rounded up
        ends = np.cumsum(microbatches, dtype=np.int64)
        starts_of_steps = [0, *ends[:-1]]
        sums = np.add.reduceat(table, starts_of_steps[::size], axis=0).tolist()

        works: list[float] = []
        for group, row in enumerate(sums):
            stats = from_ints(row, self.model)
            if self.model is None:
                works.append(float(stats.slots))
                continue
            more = float(extra[group * size : (group + 1) * size].sum())
            works.append(float(count(self.model, stats, work=self.work).hardware + more))
        return works

    def _ended(self) -> list[_Step]:
        """Return what the steps of this interval ran, except a running step without microbatches."""
        by_step = zip(self.steps, self._calls, self._products, strict=True)
        return [_Step(len(step), calls, products) for step, calls, products in by_step if step]

    def _extra(self, resolved: list[_Resolved], steps: list[_Step]) -> FloatArray:
        """Return each step's FLOPs that ``model`` lacks: (linear, attention, recompute), ``[steps, 3]``."""
        extra = np.zeros((len(steps), 3))
        if self.pattern is None or self.model is None:
            return extra

        training = self.work == "training"
        host: dict[int, list[int]] = {}  # offsets that were read from a device, by their id
        start = 0
        for i, step in enumerate(steps):
            batches = resolved[start : start + step.microbatches]
            start += step.microbatches

            convention = self.pattern.convention
            extra[i, 1:] = flops_of_calls(step.calls, convention, training=training, host=host)
            for _, lengths in batches:
                held = getattr(lengths, "held", ())  # only lengths with shared prefixes have it
                extra[i, 1:] += self.pattern.flops(lengths or (), held, training=training)

            if step.products is not None:
                stats = combine(stats for stats, _ in batches)
                share = stats.real_tokens / stats.slots if self.model.tokens == "real" else 1.0
                forward, backward, again = step.products
                estimate = count(self.model.of_kind("linear"), stats, work=self.work)
                extra[i, 0] = (forward + backward * training) * share - estimate.linear
                extra[i, 2] += again * training * share - estimate.recompute
        return extra

    def state(self) -> dict[str, Any]:
        """Return the totals for a checkpoint."""
        return {"totals": dict(self.totals), "flops": None if self._has_hidden else self._total_flops}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the totals from a checkpoint."""
        self.totals = {name: float(value) for name, value in state["totals"].items()}
        if state["flops"] is not None:
            self._total_flops = {name: float(state["flops"][name]) for name in COLUMNS}

    def _elapsed(self) -> float:
        """Return the counted seconds since the last lap, up to now if the clock runs."""
        if self._since is None:
            return self._seconds
        return self._seconds + (self.clock() - self._since)

    def _lap(self, *, whole: bool = False) -> float:
        """Return and reset the seconds since the last call; with ``whole``, only those of ended steps."""
        elapsed = self._elapsed()
        seconds = self._whole_seconds if whole else elapsed
        self._seconds = elapsed - seconds
        self._whole_seconds = 0.0
        if self._since is not None:
            self._since = self.clock()
        return seconds


def interval(rows: list[list[int]], model: FlopsModel | None, work: Work, seconds: float) -> Interval:
    """Sum the integers of ``Meter.flush`` from all ranks; ``seconds`` is this rank's time."""
    counts = num_ints(model)
    # Python integers do not overflow; a sum over a thousand ranks may exceed int64.
    totals = rows[0] if len(rows) == 1 else [sum(column) for column in zip(*rows, strict=True)]
    number, left_out_number = totals[2 * counts : 2 * counts + 2]
    peaks = [row[2 * counts + 2] for row in rows]
    unknown_slots, padded_real, padded_slots, room, hides_pairs = totals[2 * counts + 4 : 2 * counts + 9]
    floats = np.array([row[2 * counts + 9 :] for row in rows], dtype=np.int64).view(np.float64)
    extra = floats[:, :6].sum(axis=0)  # linear, attention, recompute, of measured and of left-out steps
    works = floats[:, 6:]

    measured = from_ints(totals[:counts], model)
    left_out = from_ints(totals[counts : 2 * counts], model)
    return Interval(
        measured=Counted(measured, number, _flops(model, measured, work, extra[:3])),
        left_out=Counted(left_out, left_out_number, _flops(model, left_out, work, extra[3:])),
        seconds=_seconds_by_rate(rows, counts) or seconds,
        peak=sum(peaks) / len(rows) if all(peaks) else None,
        heaviest=float(works.max(axis=0).sum()),
        mean=float(works.sum()) / len(rows),
        unknown_slots=unknown_slots,
        padded_real=padded_real,
        padded_slots=padded_slots,
        room=room,
        hides_pairs=hides_pairs,
    )


def _seconds_by_rate(rows: list[list[int]], counts: int) -> float | None:
    """Return all slots over the sum of the ranks' slots/s; None if ranks ran equally many microbatches."""
    if len({row[2 * counts] for row in rows}) == 1:
        return None

    worked = [(row[COUNTS.index("slots")], row[2 * counts + 3]) for row in rows]
    rates = [slots / nanoseconds for slots, nanoseconds in worked if slots and nanoseconds]
    if not rates:
        return None

    # A rank whose steps were all left out counts at the mean rate of the others.
    mean = sum(rates) / len(rates)
    return sum(slots for slots, _ in worked) / (mean * len(rows)) / 1e9


def _flops(model: FlopsModel | None, stats: SeqStats, work: Work, extra: FloatArray) -> FlopsBreakdown | None:
    """Return the FLOPs of some counts, with those (linear, attention, recompute) that the model lacks."""
    if model is None:
        return None
    linear, attention, recompute = map(round, extra.tolist())
    outside = FlopsBreakdown(linear=linear, attention=attention, recompute=recompute)
    return count(model, stats, work=work) + outside


def count_table(seen: list[_Resolved], model: FlopsModel | None) -> IntArray:
    """Return each microbatch's counts and its pairs in the model's windows, ``[microbatches, counts]``."""
    if not seen:
        return np.zeros((0, num_ints(model)), dtype=np.int64)

    columns = [np.array([_BASE(stats) for stats, _ in seen], dtype=np.int64)]
    if model is None:
        return columns[0]

    if model.windows:
        columns.append(_window_columns(seen, model.windows))
    for edge in model.vision_windows:
        # A batch that was collated without vision= has no window counts; use their upper bound, full windows.
        areas = [
            dict(stats.vision_window_pairs).get(
                edge, min(stats.vision_patches * edge**2, stats.vision_squares)
            )
            for stats, _ in seen
        ]
        columns.append(np.array(areas, dtype=np.int64)[:, None])
    return np.concatenate(columns, axis=1)


def _window_columns(seen: list[_Resolved], windows: tuple[Window, ...]) -> IntArray:
    """Count each microbatch's pairs in the windows, ``[microbatches, windows]``."""
    if all(stats.windows == windows for stats, _ in seen):
        return np.array([[pairs for _, pairs in stats.window_pairs] for stats, _ in seen], dtype=np.int64)
    if any(lengths is None for _, lengths in seen):
        raise ValueError(
            f"A batch has no lengths, and its stats lack the model's attention windows {list(windows)}. "
            "Give it lengths, or build its stats with windows=flops_model.windows."
        )

    pairs = _pairs_of([lengths or () for _, lengths in seen], windows)
    held = [() if lengths is None else lengths.held for _, lengths in seen]
    if any(held):  # the pairs inside a prefix that another sequence holds are computed there
        pairs -= _pairs_of(held, windows)
    return pairs


def _pairs_of(all_lengths: list[tuple[int, ...]], windows: tuple[Window, ...]) -> IntArray:
    """Count the pairs of each batch's lengths in each window, ``[batches, windows]``."""
    flat = np.fromiter(chain.from_iterable(all_lengths), dtype=np.int64)
    ends = np.cumsum([len(lengths) for lengths in all_lengths])
    return np.stack([window_pairs(flat, window, ends=ends) for window in windows], axis=1)


_BY_PRECISION = {"bf16": torch.bfloat16, "16": torch.float16, "fp16": torch.float16, "64": torch.float64}


def compute_dtype(precision: str, module: nn.Module) -> torch.dtype | str:
    """Return the dtype of the training matmuls: a torch dtype, "tf32", "fp8" or "fp4"."""
    if precision.startswith("fp8-") or "transformer-engine" in precision:
        return "fp4" if precision.endswith("nvfp4") else "fp8"
    dtype = _BY_PRECISION.get(precision.partition("-")[0])
    if dtype is None:
        sizes: Counter[torch.dtype] = Counter()
        for parameter in filter(torch.is_floating_point, module.parameters()):  # 4-bit weights are uint8
            sizes[parameter.dtype] += parameter.numel()
        dtype = max(sizes, key=lambda kind: sizes[kind], default=torch.float32)
    return "tf32" if dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else dtype


def low_precision(module: nn.Module, device: torch.device, peak: str | float) -> LowPrecision | None:
    """Return the low-precision share of a model's FLOPs and the ratio of peaks; None if one peak will do."""
    recipe = recipe_of(module)
    if recipe is None or recipe.emulate or not isinstance(peak, str):
        return None
    name = device_name(device)
    low_peak = peak_flops(name, recipe.dtype)
    bf16_peak = peak_flops(name, "bf16")
    if low_peak is None or bf16_peak is None:
        return None

    shares: dict[Work, float] = {work: fp8_share(module, work) for work in get_args(Work)}
    return LowPrecision(shares=shares, ratio=low_peak / bf16_peak)


def resolve_peak(peak: str | float, device: torch.device, dtype: torch.dtype | str) -> float | None:
    """Return a device's dense FLOP/s (given, looked up or measured); warn and return None if unknown."""
    if not isinstance(peak, str):
        return float(peak)

    name = device_name(device)
    if peak == "measure":
        kind = dtype
        if isinstance(kind, str):  # torch.mm supports neither FP8 nor FP4, and tf32 is a mode of float32
            kind = torch.float32 if kind == "tf32" else torch.bfloat16
        measured = measure_flops(device, dtype=kind)
        rank_zero_info(f"Measured {measured / 1e12:.3f} TFLOP/s on {name!r} in {kind}; the run uses {dtype}.")
        return measured

    # Devices before Ampere have no tf32 unit, even if torch is allowed to use one.
    old = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 8
    looked_up = peak_flops(name, torch.float32 if dtype == "tf32" and old else dtype)
    if looked_up is None:
        warn(
            f"No peak FLOP/s is known for {name!r} in {dtype}, so device/mfu and device/hfu are not logged. "
            "Set peak='measure' to time matmuls once, or peak=<dense FLOP/s>. "
            f"{see('peaks')}",
            MeasureWarning,
        )
    return looked_up
