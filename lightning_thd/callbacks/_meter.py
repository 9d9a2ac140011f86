"""Microbatches and clock readings of one rank -> sums of one interval over all ranks.

Host integers only: a microbatch costs an append, and everything else happens once an interval.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from lightning_thd.flops.ints import from_ints, num_ints, to_ints
from lightning_thd.flops.model import FlopsModel
from lightning_thd.flops.rates import Work, count
from lightning_thd.stats import SeqStats, combine

# what is kept of a microbatch: its stats, and its lengths for windows that the stats do not count
Seen: TypeAlias = tuple[SeqStats, tuple[int, ...] | None]

_BINS = 32  # steps whose imbalance is told apart; more in an interval are joined, to keep a gather short


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """What all ranks did between two reductions.

    Attributes:
        measured: what ran while the clock did.
        microbatches: how many of those.
        left_out: what was left out of the rates.
        left_out_microbatches: how many of those.
        peak: mean dense FLOP/s of a device; None when a rank does not know its own.
        heaviest: sum over steps of the work of the rank that had most.
        mean: sum over steps of the mean work of a rank.
    """

    measured: SeqStats
    microbatches: int
    left_out: SeqStats
    left_out_microbatches: int
    peak: float | None
    heaviest: float
    mean: float

    def __add__(self, other: Interval) -> Interval:
        return Interval(
            measured=self.measured + other.measured,
            microbatches=self.microbatches + other.microbatches,
            left_out=self.left_out + other.left_out,
            left_out_microbatches=self.left_out_microbatches + other.left_out_microbatches,
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
        self.steps: list[list[Seen]] = [[]]
        self.left_out: list[Seen] = []
        self.seconds = 0.0
        self.left_out_seconds = 0.0
        self._since: float | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing was counted since the last flush."""
        return not self.left_out and not any(self.steps)

    @property
    def running(self) -> bool:
        """Whether time counts at the moment."""
        return self._since is not None

    def start(self) -> None:
        """Let time count."""
        if self._since is None:
            self._since = self.clock()

    def stop(self) -> None:
        """Let time pass uncounted."""
        if self._since is not None:
            self.seconds += self.clock() - self._since
            self._since = None

    def lap(self) -> float:
        """Seconds counted since the last lap; counting goes on if it was."""
        running = self.running
        self.stop()
        seconds, self.seconds = self.seconds, 0.0
        if running:
            self.start()
        return seconds

    def add(self, batch: Any) -> int:
        """Count the microbatches of a batch into the step that is running; 0 when it tells nothing.

        What is kept are host integers: the batch itself, and the device memory it holds, is let go.
        """
        found = microbatches(batch)
        self.steps[-1].extend(found)
        return len(found)

    def end_step(self) -> None:
        """The optimizer has stepped; what follows belongs to the next step."""
        self.steps.append([])

    def leave_out(self) -> None:
        """Take what ran since the last lap out of the rates, but not out of the totals."""
        self.left_out.extend(chain.from_iterable(self.steps))
        self.steps = [[]]
        self.left_out_seconds += self.lap()

    def flush(self, model: FlopsModel | None, *, work: Work, peak: float | None) -> list[int]:
        """Turn what was counted into integers of a length that is the same on all ranks, and forget it.

        Args:
            model: counts FLOPs and names the windows.
            work: what was done.
            peak: dense FLOP/s of this rank's device, None when not known.
        """
        per_step = [summed(step, model) for step in self.steps if step]
        vector = [
            *to_ints(combine(per_step), model),
            *to_ints(summed(self.left_out, model), model),
            sum(len(step) for step in self.steps),
            len(self.left_out),
            round(peak or 0),
            *_binned([_work(stats, model, work) for stats in per_step]),
        ]
        self.steps, self.left_out = [[]], []
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
    peaks = table[:, 2 * counts + 2]
    bins = table[:, 2 * counts + 3 :].astype(np.int64).view(np.float64)
    return Interval(
        measured=from_ints(totals[:counts], model),
        microbatches=totals[2 * counts],
        left_out=from_ints(totals[counts : 2 * counts], model),
        left_out_microbatches=totals[2 * counts + 1],
        peak=sum(peaks) / len(rows) if all(peaks) else None,
        heaviest=float(bins.max(axis=0).sum()),
        mean=float(bins.sum()) / len(rows),
    )


def microbatches(batch: Any) -> list[Seen]:
    """What a batch tells about its sequences without a device read; nothing for a batch of unknown kind.

    Args:
        batch: a ``THDStep`` (each of its microbatches), a ``THDBatch``, bare ``SeqStats``, or rows of padded
            token ids ``[B, N]``, as a tensor or under ``"input_ids"``, which count as B dense sequences.
    """
    if (several := getattr(batch, "microbatches", None)) is not None:
        return [seen for one in several for seen in microbatches(one)]
    if isinstance(batch, SeqStats):
        return [(batch, None)]
    if isinstance(stats := getattr(batch, "stats", None), SeqStats):
        return [(stats, getattr(batch, "lengths", None))]
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else getattr(batch, "input_ids", batch)
    if isinstance(ids, (list, tuple)) and ids:
        ids = ids[0]
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        return []
    rows, length = ids.shape
    return [(SeqStats.from_lengths([length] * rows), (length,) * rows)]


def summed(seen: list[Seen], model: FlopsModel | None) -> SeqStats:
    """Add the stats of microbatches, counting the model's windows where the collator did not.

    Args:
        seen: stats and lengths of each.
        model: names the windows.
    """
    windows = model.windows if model is not None else ()
    if all(stats.windows == windows for stats, _ in seen):
        return combine([stats for stats, _ in seen])
    total = combine([replace(stats, window_pairs=()) for stats, _ in seen])
    if any(lengths is None for _, lengths in seen):
        raise ValueError(
            f"A batch counts other windows than the model's {list(windows)} and carries no lengths. "
            "Give it lengths, or build its stats with windows=flops_model.windows."
        )
    lengths = np.fromiter(chain.from_iterable(lengths or () for _, lengths in seen), dtype=np.int64)
    return replace(total, window_pairs=SeqStats.from_lengths(lengths, windows=windows).window_pairs)


def _work(stats: SeqStats, model: FlopsModel | None, work: Work) -> int:
    """What a step costs, for the imbalance: FLOPs, or slots where FLOPs are not known."""
    return stats.slots if model is None else count(model, stats, work=work).hardware


def _binned(values: list[int]) -> list[int]:
    """Join neighbours until there are at most ``_BINS``: ranks take the same number of steps.

    FLOPs of some steps can pass int64, so every sum crosses ranks as the 64 bits of a float.
    """
    width = -(-len(values) // _BINS) or 1
    joined = [sum(values[start : start + width]) for start in range(0, len(values), width)]
    floats = np.array(joined + [0] * (_BINS - len(joined)), dtype=np.float64)
    bits: list[int] = floats.view(np.int64).tolist()
    return bits
