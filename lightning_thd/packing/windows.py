"""Entries of a data set, and a window size or a schedule -> any range of the packs of an epoch.

The seed, not the epoch, decides which sequences share a window, so the packs of a window are counted only
once. Every epoch shuffles the windows, the packs of a window, and a window's sequences of equal size.
Schedules are not shuffled.
"""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from lightning_thd._checks import host_ints
from lightning_thd.packing.bins import best_fit, count_packs, regrouped
from lightning_thd.packing.entries import Entries
from lightning_thd.packing.lengths import UNBOUNDED, Slots
from lightning_thd.packing.permutation import derive_key, permute, shuffled
from lightning_thd.packing.plan import Spans, join_spans

IntArray = npt.NDArray[np.int64]

# Each number is mixed into the key of one kind of shuffle, so that no two shuffles share a key.
_MEMBERS, _WINDOWS, _TIES, _PACKS = range(4)

_BLOCK = 1 << 18  # sequences counted at a time: 2 MiB of each array


@dataclass(kw_only=True, slots=True, eq=False)
class WindowedPacks:
    """The packs of each epoch, made window by window; only one window is in memory."""

    entries: Entries  # the sequences that take part
    slots: Slots
    window: int  # entries of a window; the last window may hold fewer
    seed: int
    counts: npt.NDArray[np.uint32]  # uint32 ``[W]``, packs of every window
    # The windows of the last epoch that was read: its number, their order, the running sum of their packs.
    _order: tuple[int, IntArray, IntArray] | None = field(default=None, init=False, repr=False)
    # The packs of the last window that was read: (epoch, window), spans, offsets.
    _packed: tuple[tuple[int, int], Spans, IntArray] | None = field(default=None, init=False, repr=False)

    @property
    def total(self) -> int:
        """Return the number of packs of an epoch; every epoch has the same number."""
        return int(self.counts.sum(dtype=np.int64))

    def read(self, epoch: int, first: int, last: int) -> tuple[Spans, IntArray]:
        """Return packs ``first`` to ``last - 1`` of an epoch: their spans, and int64 offsets of each pack."""
        order, ends = self._windows(epoch)
        parts: list[Spans] = []
        sizes: list[IntArray] = []  # pieces of each pack
        place = int(np.searchsorted(ends, first, side="right"))  # the window that holds pack ``first``
        while first < last:
            window = int(order[place])
            begin = int(ends[place]) - int(self.counts[window])  # the number of the window's first pack
            spans, offsets = self._packs(epoch, window)
            low = first - begin
            high = min(last, int(ends[place])) - begin
            parts.append(spans.take(slice(int(offsets[low]), int(offsets[high]))))
            sizes.append(np.diff(offsets[low : high + 1]))
            first = begin + high
            place += 1

        joined = parts[0] if len(parts) == 1 else join_spans(parts)  # most steps are inside one window
        return joined, np.cumsum(np.concatenate([np.zeros(1, np.int64), *sizes]))

    def _windows(self, epoch: int) -> tuple[IntArray, IntArray]:
        """Return the numbers of the windows in the order of an epoch, and the running sum of their packs."""
        cached = self._order  # read once, because a thread that plans ahead may replace it
        if cached is not None and cached[0] == epoch:
            return cached[1:]
        total = len(self.counts)
        order = permute(np.arange(total), total, key=derive_key(self.seed, _WINDOWS, epoch))
        ends = np.cumsum(self.counts[order], dtype=np.int64)
        self._order = epoch, order, ends
        return order, ends

    def _packs(self, epoch: int, window: int) -> tuple[Spans, IntArray]:
        """Return the packs of a window in the order of an epoch: their spans, and offsets of each pack."""
        cached = self._packed  # read once, as in ``_windows``
        if cached is not None and cached[0] == (epoch, window):
            return cached[1:]

        members = window_members(self.entries, self.window, self.seed, window, window + 1)
        # Best fit sorts by length and keeps the order of equal ones: this shuffles sequences of equal size.
        ties = shuffled(len(members), key=derive_key(self.seed, _TIES, epoch, window))
        spans = self.entries.spans(members[ties])
        padded = self.slots.padded(spans.lengths)
        packs = best_fit(padded, self.slots, self.entries.patches(spans))
        if len(packs) != self.counts[window]:
            raise ValueError(
                f"Window {window} has {len(packs)} packs, but {self.counts[window]} were counted. The "
                "lengths changed, or the counts are of other data. Make a new planner, without counts."
            )

        order = shuffled(len(packs), key=derive_key(self.seed, _PACKS, epoch, window))
        pieces, offsets = regrouped(packs.offsets, order)
        shuffled_spans = spans.take(packs.indices[pieces])
        self._packed = (epoch, window), shuffled_spans, offsets
        return shuffled_spans, offsets


def make_windows(
    entries: Entries,
    slots: Slots,
    window: int,
    seed: int,
    *,
    counts: npt.NDArray[np.uint32] | None = None,
    num_workers: int = 0,
) -> WindowedPacks:
    """Cut the entries into windows, and count the packs of each unless counts are given."""
    total = -(-entries.total // window)
    if counts is None:
        counts = count_windows(entries, slots, window, seed, num_workers=num_workers)
    counts = host_ints(counts, "counts", least=1).astype(np.uint32)
    if counts.shape != (total,):
        raise ValueError(f"counts has {len(counts)} windows but there are {total}. Pass None to count again.")
    return WindowedPacks(entries=entries, slots=slots, window=window, seed=seed, counts=counts)


def window_members(entries: Entries, window: int, seed: int, first: int, last: int) -> IntArray:
    """Return the dataset indices in the windows ``first`` to ``last - 1``, window after window."""
    positions = np.arange(first * window, min(last * window, entries.total))
    return entries.drawn(positions, window, derive_key(seed, _MEMBERS))


def count_windows(
    entries: Entries, slots: Slots, window: int, seed: int, *, num_workers: int = 0
) -> npt.NDArray[np.uint32]:
    """Count the packs of every window, ``[W]``, in this process or in forked workers that use only numpy."""
    total = -(-entries.total // window)
    windows_of_block = max(1, _BLOCK // window)
    blocks = [(first, min(first + windows_of_block, total)) for first in range(0, total, windows_of_block)]
    count = partial(_count_block, entries, slots, window, seed)
    if not num_workers or len(blocks) == 1:
        return np.concatenate([count(block) for block in blocks])

    # Forked, because a fork shares lengths and media with this process, which may not be picklable.
    fork = multiprocessing.get_context("fork")
    workers = min(num_workers, len(blocks))
    with fork.Pool(workers, initializer=_worker_count.append, initargs=(count,)) as pool:
        return np.concatenate(pool.map(_count_in_worker, blocks, chunksize=1))


def _count_block(
    entries: Entries, slots: Slots, window: int, seed: int, block: tuple[int, int]
) -> npt.NDArray[np.uint32]:
    """Count the packs of the windows ``block[0]`` to ``block[1] - 1``."""
    first, last = block
    members = window_members(entries, window, seed, first, last)
    counts = []
    for begin in range(0, len(members), window):
        spans = entries.spans(members[begin : begin + window])
        counts.append(_count_packs_of(entries, spans, slots))
    return np.array(counts, dtype=np.uint32)


def _count_packs_of(entries: Entries, spans: Spans, slots: Slots) -> int:
    """Count the packs that ``best_fit`` makes, without laying them out unless patches are bounded."""
    padded = slots.padded(spans.lengths)
    patches = entries.patches(spans) if slots.patches < UNBOUNDED else None
    if patches is not None:
        return len(best_fit(padded, slots, patches))
    fits = padded <= slots.usable
    too_long = len(padded) - int(fits.sum())  # each has its own pack
    return too_long + count_packs(padded[fits] // slots.multiple, slots.usable // slots.multiple)


_Count = Callable[[tuple[int, int]], npt.NDArray[np.uint32]]
_worker_count: list[_Count] = []  # the function that a forked worker calls; a fork copies it without pickling


def _count_in_worker(block: tuple[int, int]) -> npt.NDArray[np.uint32]:
    """Call the worker's function: a pool pickles what it maps, and this name is all that is pickled."""
    return _worker_count[0](block)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScheduledPacks:
    """The packs of a user's schedule, in the order of their numbers; every epoch runs the same packs."""

    entries: Entries  # the sequences that take part
    indices: IntArray  # int64 ``[S]``, dataset indices, pack after pack
    offsets: IntArray  # int64 ``[P + 1]``, where each pack begins in ``indices``

    @property
    def total(self) -> int:
        """Return the number of packs of an epoch."""
        return len(self.offsets) - 1

    def digest(self) -> str:
        """Return a hexadecimal hash of the packs and their sequences."""
        hashed = hashlib.blake2b(self.indices.astype("<i8").tobytes(), digest_size=16)
        hashed.update(self.offsets.astype("<i8").tobytes())
        return hashed.hexdigest()

    def read(self, epoch: int, first: int, last: int) -> tuple[Spans, IntArray]:
        """Return the packs ``first`` to ``last - 1``: their spans, and int64 offsets of each pack."""
        begin = self.offsets[first]
        spans = self.entries.spans(self.indices[begin : self.offsets[last]])
        return spans, self.offsets[first : last + 1] - begin


def open_schedule(
    schedule: npt.ArrayLike | Sequence[int], entries: Entries, count: int, slots: Slots
) -> ScheduledPacks:
    """Check a schedule, the pack number of each sequence (gaps are allowed), and sort sequences by pack."""
    numbers = np.asarray(schedule)
    if numbers.shape != (count,) or numbers.dtype.kind not in "iu" or (count and numbers.min() < 0):
        raise ValueError(
            f"schedule is {numbers.dtype} {numbers.shape} for {count} sequences; wanted one number >= 0 each."
        )
    if entries.oversize in ("truncate", "split"):
        raise ValueError(
            f"oversize={entries.oversize!r} changes sequences that the schedule has placed. Cut them first."
        )
    indices = np.argsort(numbers, kind="stable")
    indices = indices[~np.isin(indices, entries.left_out)]
    ordered = numbers[indices]
    offsets = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1], [True]]))

    # With ``own_pack``, a pack of one sequence may be above the bounds.
    bounded = (np.diff(offsets) > 1) | (entries.oversize != "own_pack")
    spans = entries.spans(indices)
    bounds = [("slots", slots.padded(spans.lengths), slots.usable, "capacity")]
    patches = entries.patches(spans)
    if patches is not None:
        bounds.append(("patches", patches, slots.patches, "max_patches"))
    for unit, values, most, setting in bounds:
        sums = np.concatenate([[0], np.cumsum(values)])
        totals = np.diff(sums[offsets])
        over = (totals > most) & bounded
        if over.any():
            first = int(over.argmax())
            raise ValueError(
                f"Microbatch {ordered[offsets[first]]} of the schedule takes {totals[first]} {unit}, but "
                f"{most} of a pack are usable. Raise {setting}, or schedule fewer sequences there."
            )
    return ScheduledPacks(entries=entries, indices=indices, offsets=offsets)
