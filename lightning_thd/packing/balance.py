"""The sequences of a step -> per rank as many microbatches of equal work, none above the capacity."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lightning_thd._checks import host_ints, instance, whole_number
from lightning_thd.packing.bins import Packing, best_fit, regrouped
from lightning_thd.packing.cost import Cost
from lightning_thd.packing.lengths import MOST_RANKS, Slots, check_capacity
from lightning_thd.packing.microsteps import fill_microsteps, waiting

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

MOST_MICROBATCHES = 2**24  # of a step, over all ranks
_EVEN_ENOUGH = 1.01  # work waited for, of an even share: below it no more time is spent on a plan


class Scheduler(Protocol):
    """The interface of a user's own scheduler: the signature of :func:`balance`."""

    def __call__(
        self, lengths: IntArray, capacity: int, *, dp: int, cost: Cost
    ) -> Sequence[Sequence[npt.ArrayLike]]:
        """Return per rank a list of microbatches, each the positions of its sequences in ``lengths``."""
        ...


def balance(
    lengths: npt.ArrayLike,
    capacity: int,
    *,
    dp: int,
    cost: Cost | None = None,
    num_microbatches: int | None = None,
) -> list[list[IntArray]]:
    """Share sequences out so that all ranks have equal work and no microbatch is above the capacity.

    Args:
        lengths: ints ``[S]``, slots of each sequence.
        capacity: most slots of a microbatch.
        dp: data-parallel ranks.
        cost: work of a sequence; the default is that of a model with hidden size 4096.
        num_microbatches: microbatches of each rank; None takes the fewest that hold everything.

    Returns:
        Per rank a list of as many microbatches, each an int64 array of positions in ``lengths``, the longest
        sequence first.

    Raises:
        ValueError: when a sequence is longer than the capacity, or they do not fit the microbatches asked
            for.
    """
    check_capacity(capacity)
    whole_number(dp, "dp", least=1, most=MOST_RANKS, advice="Pass the number of data-parallel ranks.")
    if num_microbatches is not None:
        whole_number(num_microbatches, "num_microbatches", least=1, most=MOST_MICROBATCHES // dp)
    if cost is not None:
        instance(cost, "cost", Cost, advice="Pass Cost(linear=..., quadratic=...).")
    values = host_ints(lengths, "lengths", least=1, advice="Leave empty sequences out.")
    if len(values) and values.max() > capacity:
        longest = int(values.argmax())
        raise ValueError(
            f"Sequence {longest} has {values[longest]} tokens but capacity={capacity}. "
            "Raise capacity, or give the lengths to PackPlanner with oversize=."
        )
    work = (Cost() if cost is None else cost)(values)
    slots = Slots(usable=int(capacity), multiple=1)
    order, offsets = balanced_bins(values, work, slots, dp=dp, num_microbatches=num_microbatches)
    bins = np.split(order, offsets[1:-1])
    each = len(bins) // dp
    return [bins[rank * each : (rank + 1) * each] for rank in range(dp)]


def balanced_bins(
    lengths: IntArray,
    work: FloatArray,
    slots: Slots,
    *,
    dp: int,
    num_microbatches: int | None = None,
    given: Packing | None = None,
) -> tuple[IntArray, IntArray]:
    """Share sequences out over bins of equal work, ordered by rank and then microbatch.

    Args:
        lengths: int64 ``[S]``, slots of each sequence; one above the capacity gets a bin of its own.
        work: float64 ``[S]``, work of each sequence.
        slots: what a pack offers.
        dp: data-parallel ranks.
        num_microbatches: microbatches of each rank; None takes the fewest that best fit needs.
        given: packs that are known to be few enough, to fall back to; None computes them.

    Returns:
        int64 ``[S]`` positions and int64 ``[bins + 1]`` offsets of the bins in them.
    """
    packs = best_fit(lengths, slots) if given is None else given
    least = max(1, -(-len(packs) // dp))
    count = dp * (least if num_microbatches is None else num_microbatches)
    if len(packs) > count:
        raise ValueError(
            f"{len(lengths)} sequences need {len(packs)} packs of {slots.usable} slots but dp={dp} with "
            f"num_microbatches={num_microbatches} has {count}. Pass num_microbatches={least}, or None."
        )
    owner = _best_owner(lengths, work, slots.usable, dp, count, packs)
    # longest first inside a bin: sequences of one length lie side by side, and attention reads a run of them
    # as one batch without a copy
    order = np.lexsort((-lengths, owner))
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(owner, minlength=count), out=offsets[1:])
    totals = _bin_work(owner, work, count)
    return seated(order, offsets, totals, dp)


def _best_owner(
    lengths: IntArray, work: FloatArray, capacity: int, dp: int, count: int, packs: Packing
) -> IntArray:
    """Choose the bin of each sequence: longest first if that is even enough, else the best of three ways."""
    even = float(work.sum()) / dp
    spread = _longest_first(lengths, work, capacity, count)
    if spread is not None and _waiting(spread, work, count, dp) <= even * _EVEN_ENOUGH:
        return spread
    packed = np.empty(len(lengths), np.int64)
    packed[packs.indices] = np.repeat(np.arange(len(packs)), np.diff(packs.offsets))
    found = [owner for owner in (spread, packed) if owner is not None]
    if lengths.max() <= capacity:
        level = fill_microsteps(
            lengths, work, capacity, dp=dp, num_microbatches=count // dp, enough=even * _EVEN_ENOUGH
        )
        found += [] if level is None else [level]
    return min(found, key=lambda owner: _waiting(owner, work, count, dp))


def _waiting(owner: IntArray, work: FloatArray, count: int, dp: int) -> float:
    return waiting(_bin_work(owner, work, count), dp)


def _bin_work(owner: IntArray, work: FloatArray, count: int) -> FloatArray:
    return np.bincount(owner, weights=work, minlength=count).astype(np.float64)


def seated(order: IntArray, offsets: IntArray, totals: FloatArray, dp: int) -> tuple[IntArray, IntArray]:
    """Reorder bins by rank and microbatch, in the way :func:`deal` assigns them by their work."""
    members, ends = regrouped(offsets, deal(totals, dp))
    return order[members], ends


def scheduled_bins(
    scheduler: Scheduler, lengths: IntArray, capacity: int, *, dp: int, cost: Cost
) -> tuple[IntArray, IntArray]:
    """Call a user's scheduler, and check that its plan is complete, fits and is even."""
    plan = [
        [np.asarray(bin_, np.int64) for bin_ in rank]
        for rank in scheduler(lengths, capacity, dp=dp, cost=cost)
    ]
    numbers = sorted({len(rank) for rank in plan})
    if len(plan) != dp or len(numbers) != 1 or numbers[0] < 1:
        raise ValueError(
            f"The scheduler planned {len(plan)} ranks with {numbers} microbatches for dp={dp}. "
            f"It must return {dp} lists with the same number of microbatches, at least one."
        )
    bins = [bin_ for rank in plan for bin_ in rank]
    order = np.concatenate([np.empty(0, np.int64), *bins])
    outside = (order < 0) | (order >= len(lengths))
    if outside.any():
        raise ValueError(
            f"The scheduler used position {order[outside][0]} of {len(lengths)} sequences. "
            "It must return positions in the lengths it was given."
        )
    uses = np.bincount(order, minlength=len(lengths))
    if (uses != 1).any():
        wrong = int((uses != 1).argmax())
        raise ValueError(
            f"The scheduler used position {wrong} {uses[wrong]} times, of {len(lengths)} sequences. "
            "It must put each position in one microbatch."
        )
    for number, bin_ in enumerate(bins):
        if lengths[bin_].sum() > capacity and len(bin_) > 1:
            raise ValueError(
                f"The scheduler put {lengths[bin_].sum()} slots in microbatch {number % numbers[0]} of rank "
                f"{number // numbers[0]}, above the {capacity} that fit. Fill it with fewer sequences."
            )
    return order, np.concatenate([[0], np.cumsum([len(bin_) for bin_ in bins])])


def _longest_first(lengths: IntArray, work: FloatArray, capacity: int, bins: int) -> IntArray | None:
    heap = [(0.0, i) for i in range(bins)]
    room = [capacity] * bins
    owner = np.empty(len(lengths), np.int64)
    for item in np.argsort(-work, kind="stable").tolist():
        size = int(lengths[item])
        tried = []
        while heap:
            load, i = heapq.heappop(heap)
            if room[i] >= size or room[i] == capacity:
                break
            tried.append((load, i))
        else:
            return None
        owner[item] = i
        room[i] -= size
        for other in tried:
            heapq.heappush(heap, other)
        heapq.heappush(heap, (load + float(work[item]), i))
    return owner


def deal(totals: FloatArray, dp: int) -> IntArray:
    """Assign bins of given work to ranks and microbatches, so that bins of like work run together.

    Bins of like work run at the same time, the heaviest of each microstep on the rank with the least work so
    far.
    """
    ranked = np.argsort(-totals, kind="stable").reshape(-1, dp)
    load = np.zeros(dp)
    seats = np.empty((dp, len(ranked)), np.int64)
    for step, group in enumerate(ranked):
        ranks = np.argsort(load, kind="stable")
        seats[ranks, step] = group
        load[ranks] += totals[group]
    return seats.reshape(-1)
