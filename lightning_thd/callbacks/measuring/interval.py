"""Microbatches and clock readings of one rank -> sums of one interval over all ranks.

Host integers only: a microbatch costs an append, and everything else happens once an interval.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_thd.callbacks.measuring.batches import Seen, microbatches
from lightning_thd.flops.model import FlopsModel
from lightning_thd.flops.rates import Work, count
from lightning_thd.flops.vector import COUNTS, from_ints, num_ints
from lightning_thd.stats import Blocks, Chunk, IntArray, SeqStats, Window, window_pairs

_BASE = attrgetter(*COUNTS)
_GROUP = 64  # microbatches whose lengths are counted at once: arrays that stay in a cache
_BINS = 32  # steps whose imbalance is told apart; more in an interval are joined, to keep a gather short


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """The counts and seconds of all ranks between two reductions.

    Attributes:
        measured: what ran while the clock did.
        microbatches: how many of those.
        left_out: what was left out of the rates.
        left_out_microbatches: how many of those.
        peak: mean dense FLOP/s of a device; None when a rank does not know its own.
        own_seconds: set where a rank left out steps that others measured, as when it alone compiled: the
            seconds that give the sum of the ranks' own rates.
        heaviest: sum over steps of the work of the rank that had most.
        mean: sum over steps of the mean work of a rank.
    """

    measured: SeqStats
    microbatches: int
    left_out: SeqStats
    left_out_microbatches: int
    peak: float | None
    own_seconds: float | None
    heaviest: float
    mean: float

    def __add__(self, other: Interval) -> Interval:
        return Interval(
            measured=self.measured + other.measured,
            microbatches=self.microbatches + other.microbatches,
            left_out=self.left_out + other.left_out,
            left_out_microbatches=self.left_out_microbatches + other.left_out_microbatches,
            peak=other.peak,
            own_seconds=other.own_seconds,
            heaviest=self.heaviest + other.heaviest,
            mean=self.mean + other.mean,
        )


class Meter:
    """Collects the microbatches and running time of one rank between two reductions."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.steps: list[list[Seen]] = [[]]
        self.left_out: list[Seen] = []
        self.seconds = 0.0
        self.left_out_seconds = 0.0
        self._whole_seconds = 0.0  # of the counted seconds, those of steps that have ended
        self._since: float | None = None
        self._weights: tuple[FlopsModel | None, npt.NDArray[np.float64]] | None = None

    @property
    def empty(self) -> bool:
        """Return whether no microbatch was counted since the last flush."""
        return not self.left_out and not any(self.steps)

    @property
    def running(self) -> bool:
        """Return whether the clock is running."""
        return self._since is not None

    def start(self) -> None:
        """Start the clock; time counts from now on."""
        if self._since is None:
            self._since = self.clock()

    def stop(self) -> None:
        """Stop the clock; time passes uncounted until ``start``."""
        if self._since is not None:
            self.seconds += self.clock() - self._since
            self._since = None

    def elapsed(self) -> float:
        """Return the seconds counted since the last lap."""
        return self.seconds + (self.clock() - self._since if self._since is not None else 0.0)

    def lap(self, *, whole: bool = False) -> float:
        """Return the seconds counted since the last lap and start a new one; a running clock runs on.

        Args:
            whole: leave those of the running step to the next lap.
        """
        elapsed = self.elapsed()
        seconds = self._whole_seconds if whole else elapsed
        self.seconds, self._whole_seconds = elapsed - seconds, 0.0
        if self._since is not None:
            self._since = self.clock()
        return seconds

    def add(self, batch: Any) -> int:
        """Add a batch's microbatches to the running step and return how many it held.

        What is kept are host integers: the batch itself, and the device memory it holds, is let go.
        """
        found = microbatches(batch)
        self.steps[-1].extend(found)
        return len(found)

    def end_step(self) -> None:
        """Close the running step and begin the next one, as the optimizer has stepped."""
        self.steps.append([])
        self._whole_seconds = self.elapsed()

    def leave_out(self) -> None:
        """Exclude what ran since the last lap from the rates, but not from the totals."""
        self.left_out.extend(chain.from_iterable(self.steps))
        self.steps = [[]]
        self.left_out_seconds += self.lap()

    def flush(
        self,
        model: FlopsModel | None,
        *,
        work: Work,
        peak: float | None,
        per_step: bool = True,
        whole: bool = False,
    ) -> list[int]:
        """Return the counts as integers, equally many on all ranks, and reset them; ``peak`` in FLOP/s.

        ``whole`` leaves the running step to the next flush.
        """
        running = self.steps.pop() if whole else []
        sizes = [len(step) for step in self.steps if step]
        measured = count_table(list(chain.from_iterable(self.steps)), model)
        left_out = count_table(self.left_out, model)
        works = np.zeros(0)
        if per_step and sizes:
            if self._weights is None or self._weights[0] is not model:
                self._weights = model, work_weights(model, work)
            starts = np.cumsum([0, *sizes[:-1]])
            works = np.add.reduceat(measured, starts, axis=0) @ self._weights[1]
        vector = [
            *measured.sum(axis=0).tolist(),
            *left_out.sum(axis=0).tolist(),
            len(measured),
            len(left_out),
            round(peak or 0),
            round((self._whole_seconds if whole else self.elapsed()) * 1e9),
            *_binned(works),
        ]
        self.steps, self.left_out = [running], []
        return vector


def interval(rows: list[list[int]], model: FlopsModel | None) -> Interval:
    """Sum the integers that ``Meter.flush`` gave over all ranks."""
    counts = num_ints(model)
    # Python integers: a sum over a thousand ranks may pass int64
    totals = rows[0] if len(rows) == 1 else [sum(column) for column in zip(*rows, strict=True)]
    peaks = [row[2 * counts + 2] for row in rows]
    several = len(rows) > 1
    bins = np.array([row[2 * counts + 4 :] for row in rows] if several else [[0]], dtype=np.int64)
    works = bins.view(np.float64)
    return Interval(
        measured=from_ints(totals[:counts], model),
        microbatches=totals[2 * counts],
        left_out=from_ints(totals[counts : 2 * counts], model),
        left_out_microbatches=totals[2 * counts + 1],
        peak=sum(peaks) / len(rows) if all(peaks) else None,
        own_seconds=_own_seconds(rows, counts),
        heaviest=float(works.max(axis=0).sum()),
        mean=float(works.sum()) / len(rows),
    )


def _own_seconds(rows: list[list[int]], counts: int) -> float | None:
    if len({row[2 * counts] for row in rows}) == 1:
        return None
    worked = [(row[COUNTS.index("slots")], row[2 * counts + 3]) for row in rows]
    rates = [slots / nanoseconds for slots, nanoseconds in worked if slots and nanoseconds]
    return sum(slots for slots, _ in worked) / sum(rates) / 1e9 if rates else None


def count_table(seen: list[Seen], model: FlopsModel | None) -> IntArray:
    """Return the counts of each microbatch, ``[microbatches, counts]``, the model's windows among them."""
    if not seen:
        return np.zeros((0, num_ints(model)), dtype=np.int64)
    columns = [np.array([_BASE(stats) for stats, _ in seen], dtype=np.int64)]
    if model is not None and model.windows:
        columns.append(_window_columns(seen, model.windows, columns[0]))
    for edge in model.vision_windows if model is not None else ():
        areas = [dict(stats.vision_window_pairs).get(edge, 0) for stats, _ in seen]
        columns.append(np.array(areas, dtype=np.int64)[:, None])
    return np.concatenate(columns, axis=1)


def work_weights(model: FlopsModel | None, work: Work) -> npt.NDArray[np.float64]:
    """Return the work of one unit of each count, in FLOPs, or in slots where FLOPs are unknown.

    FLOPs are linear in the counts, so the cost of a step is a product with these.
    """
    weights = np.zeros(num_ints(model))
    if model is None:
        weights[COUNTS.index("slots")] = 1.0
        return weights
    for index in range(len(weights)):
        ints = [0] * len(weights)
        ints[index] = 2 * model.merge  # halves and merged patches stay whole
        try:
            weights[index] = count(model, from_ints(ints, model), work=work).hardware / ints[index]
        except ValueError:  # patches on a model without a vision tower
            continue
    return weights


def _window_columns(seen: list[Seen], windows: tuple[Window, ...], base: IntArray) -> IntArray:
    if all(stats.windows == windows for stats, _ in seen):
        return np.array([[pairs for _, pairs in stats.window_pairs] for stats, _ in seen], dtype=np.int64)
    if any(lengths is None for _, lengths in seen):
        raise ValueError(
            f"A batch counts other windows than the model's {list(windows)} and carries no lengths. "
            "Give it lengths, or build its stats with windows=flops_model.windows."
        )
    within = _all_within(seen, windows, base)
    tokens, squares = base[:, COUNTS.index("real_tokens")], base[:, COUNTS.index("sum_squares")]
    found = np.repeat(((squares + tokens) // 2)[:, None], len(windows), axis=1)
    for rows in np.array_split(np.flatnonzero(~within), range(_GROUP, len(seen), _GROUP)):
        if len(rows):
            found[rows] = _group_columns([seen[row] for row in rows], windows)
    return found


def _all_within(seen: list[Seen], windows: tuple[Window, ...], base: IntArray) -> npt.NDArray[np.bool_]:
    """Return which microbatches cannot hold a sequence longer than the smallest window, ``[microbatches]``.

    No number is further from the mean of n than sqrt(n - 1) of their standard deviations (Samuelson), so the
    sums that were counted already tell it. A share of a pack, whose sums are parts, has fewer sequences than
    lengths and is counted by these; a single sequence always is.
    """
    ends = [w.size if isinstance(w, Chunk) else w for w in windows if not isinstance(w, Blocks)]
    if len(ends) < len(windows):
        return np.zeros(len(seen), dtype=np.bool_)
    size = float(min(ends))
    own = ("sequences", "real_tokens", "sum_squares")
    n, tokens, squares = (base[:, COUNTS.index(name)].astype(np.float64) for name in own)
    whole = np.array([len(lengths or ()) for _, lengths in seen]) == n
    room, deviation = (
        size * n - tokens,
        n * squares * (1.0 + 1e-9) - tokens * tokens,
    )  # more than its rounding
    bounded = (room >= 0) & (room * room > deviation * (n - 1.0))
    found: npt.NDArray[np.bool_] = bounded & whole & (n > 1)
    return found


def _group_columns(seen: list[Seen], windows: tuple[Window, ...]) -> IntArray:
    all_lengths = [lengths or () for _, lengths in seen]
    # three times as fast as numpy's own ways from a tuple
    packed = b"".join([_packer(len(lengths))(*lengths) for lengths in all_lengths])
    flat = np.frombuffer(packed, dtype=np.int64)
    ends = np.cumsum([len(lengths) for lengths in all_lengths])
    return np.stack([window_pairs(flat, window, ends=ends) for window in windows], axis=1)


@lru_cache(maxsize=4096)  # as many numbers of sequences; parsing the format takes as long as packing 200
def _packer(number: int) -> Callable[..., bytes]:
    """Return the function that packs a number of integers as int64."""
    return struct.Struct(f"{number}q").pack


def _binned(values: npt.NDArray[np.float64]) -> list[int]:
    """Sum neighbouring values to at most ``_BINS`` floats and return their bits as integers.

    FLOPs of some steps can pass int64, so every sum crosses ranks as the 64 bits of a float.
    """
    if not len(values):
        return [0] * _BINS  # the bits of 0.0
    width = -(-len(values) // _BINS)
    joined = [values[start : start + width].sum() for start in range(0, len(values), width)]
    floats = np.array(joined + [0.0] * (_BINS - len(joined)), dtype=np.float64)
    bits: list[int] = floats.view(np.int64).tolist()
    return bits
