"""Microbatches and clock readings of one rank -> sums of one interval over all ranks.

Host integers only: a microbatch costs an append, and everything else happens once an interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from lightning_thd.flops.ints import from_ints, num_ints, to_ints
from lightning_thd.flops.model import FlopsModel
from lightning_thd.flops.rates import Work, count
from lightning_thd.stats import SeqStats, combine

_BINS = (
    32  # steps of an interval whose imbalance is told apart; more are joined, so that a gather stays short
)
_UNIT = 1 << 20  # FLOPs in which the work of a step crosses ranks: int64 holds 9.7e24 of them


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """What all ranks did between two logs.

    Attributes:
        measured: what ran while the clock did.
        microbatches: how many of those.
        seconds: what the slowest rank needed.
        everything: ``measured`` and what was left out of the rates.
        num_microbatches: how many of those.
        peak: mean dense FLOP/s of a device; None when a rank does not know its own.
        heaviest: sum over steps of the work of the rank that had most.
        mean: sum over steps of the mean work of a rank.
    """

    measured: SeqStats = SeqStats()
    microbatches: int = 0
    seconds: float = 0.0
    everything: SeqStats = SeqStats()
    num_microbatches: int = 0
    peak: float | None = None
    heaviest: int = 0
    mean: float = 0.0

    def __add__(self, other: Interval) -> Interval:
        return Interval(
            measured=self.measured + other.measured,
            microbatches=self.microbatches + other.microbatches,
            seconds=self.seconds + other.seconds,
            everything=self.everything + other.everything,
            num_microbatches=self.num_microbatches + other.num_microbatches,
            peak=other.peak,
            heaviest=self.heaviest + other.heaviest,
            mean=self.mean + other.mean,
        )


class Meter:
    """Collects microbatches and running time between two reductions.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.steps: list[list[Any]] = [[]]
        self.left_out: list[Any] = []
        self.elapsed = 0.0
        self.running_since: float | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing was counted since the last reduction."""
        return not self.left_out and not any(self.steps)

    def start(self) -> None:
        """Let the clock run."""
        if self.running_since is None:
            self.running_since = self.clock()

    def stop(self) -> None:
        """Hold the clock."""
        if self.running_since is not None:
            self.elapsed += self.clock() - self.running_since
            self.running_since = None

    def add(self, microbatches: Iterable[Any]) -> None:
        """Count microbatches of the step that is running."""
        self.steps[-1].extend(microbatches)

    def end_step(self) -> None:
        """The optimizer has stepped; what follows belongs to the next step."""
        self.steps.append([])

    def leave_out(self) -> None:
        """Take what ran since the last reduction out of the rates, but not out of the totals."""
        self.left_out.extend(chain.from_iterable(self.steps))
        self.steps = [[]]
        self.elapsed = 0.0
        if self.running_since is not None:
            self.running_since = self.clock()

    def flush(self, model: FlopsModel | None, *, work: Work, peak: float | None) -> list[int]:
        """Turn what was counted into integers of a length that is the same on all ranks, and forget it.

        Args:
            model: counts FLOPs and names the windows.
            work: what was done.
            peak: dense FLOP/s of this rank's device, None when not known.
        """
        if self.running_since is not None:
            self.stop()
            self.start()
        per_step = [summed(step, model) for step in self.steps if step]
        measured, rest = combine(per_step), summed(self.left_out, model)
        vector = [
            *to_ints(measured, model),
            *to_ints(rest, model),
            sum(len(step) for step in self.steps),
            len(self.left_out),
            round(self.elapsed * 1e9),
            round(peak or 0),
            *_binned([_work(stats, model, work) for stats in per_step]),
        ]
        self.steps, self.left_out, self.elapsed = [[]], [], 0.0
        return vector


def interval(rows: list[list[int]], model: FlopsModel | None) -> Interval:
    """Sum the flushed integers of all ranks.

    Args:
        rows: one list of ``Meter.flush`` per rank.
        model: the one they were made with.
    """
    table = np.array(rows, dtype=object)  # Python integers: a sum over a thousand ranks may pass int64
    counts = num_ints(model)
    totals = [int(value) for value in table.sum(axis=0)]
    microbatches, left_out = totals[2 * counts : 2 * counts + 2]
    measured = from_ints(totals[:counts], model)
    nanoseconds, peaks = table[:, 2 * counts + 2], table[:, 2 * counts + 3]
    bins = table[:, 2 * counts + 4 :]
    return Interval(
        measured=measured,
        microbatches=microbatches,
        seconds=max(nanoseconds) / 1e9,
        everything=measured + from_ints(totals[counts : 2 * counts], model),
        num_microbatches=microbatches + left_out,
        peak=sum(peaks) / len(rows) if all(peaks) else None,
        heaviest=sum(max(column) for column in bins.T),
        mean=float(bins.sum()) / len(rows),
    )


def summed(microbatches: list[Any], model: FlopsModel | None) -> SeqStats:
    """Add the stats of microbatches, counting the model's windows where the collator did not.

    Args:
        microbatches: ``THDBatch`` or bare ``SeqStats``.
        model: names the windows.
    """
    all_stats = [getattr(one, "stats", one) for one in microbatches]
    windows = model.windows if model is not None else ()
    if all(stats.windows == windows for stats in all_stats):
        return combine(all_stats)
    total = combine([replace(stats, window_pairs=()) for stats in all_stats])
    lengths = np.fromiter(chain.from_iterable(_lengths(one) for one in microbatches), dtype=np.int64)
    return replace(total, window_pairs=SeqStats.from_lengths(lengths, windows=windows).window_pairs)


def _lengths(microbatch: Any) -> Iterable[int]:  # noqa: ANN401 - THDBatch, or anything with stats
    lengths = getattr(microbatch, "lengths", None)
    if lengths is None:
        raise ValueError(
            f"A {type(microbatch).__name__} counts other windows than the model and carries no lengths. "
            "Give it lengths, or build its stats with windows=flops_model.windows."
        )
    return lengths  # type: ignore[no-any-return]


def _work(stats: SeqStats, model: FlopsModel | None, work: Work) -> int:
    """What a step costs, for the imbalance: FLOPs, or slots where FLOPs are not known."""
    return stats.slots if model is None else count(model, stats, work=work).hardware // _UNIT


def _binned(values: list[int]) -> list[int]:
    """Join neighbours until there are at most ``_BINS``: ranks take the same number of steps."""
    width = -(-len(values) // _BINS) or 1
    joined = [sum(values[start : start + width]) for start in range(0, len(values), width)]
    return joined + [0] * (_BINS - len(joined))
