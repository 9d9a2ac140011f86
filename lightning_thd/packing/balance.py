"""The sequences of a step -> the same number of microbatches per rank, of similar work, within the capacity.

The microbatches that all ranks run at the same time are a microstep. It lasts as long as its heaviest
microbatch. So the work must be equal within a microstep, but may differ between microsteps. The longest
sequences share a heavy microstep, whose other microbatches are filled with shorter sequences. A bin is a
microbatch before it has a rank.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lightning_thd._checks import host_ints, instance, whole_number
from lightning_thd.packing.bins import Packing, best_fit, regrouped
from lightning_thd.packing.cost import Cost, media_table
from lightning_thd.packing.lengths import (
    MOST_RANKS,
    UNBOUNDED,
    Slots,
    check_capacity,
    check_patches,
    too_many_patches,
)

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

MOST_MICROBATCHES = 2**24  # A step with more microbatches, over all ranks, is probably a mistake.
_UNEVEN = 1.05  # With max_patches, a plan 5 % above its lower bound is also tried with one more microbatch.
_EVEN_ENOUGH = 1.01  # A plan that lasts at most 1 % longer than the least possible is not improved.


class Scheduler(Protocol):
    """The signature of a function that a user passes in place of :func:`balance`."""

    def __call__(
        self, lengths: IntArray, capacity: int, *, dp: int, cost: Cost
    ) -> Sequence[Sequence[npt.ArrayLike]]:
        """Return a list of microbatches per rank; a microbatch is a list of positions in ``lengths``."""


def balance(
    lengths: npt.ArrayLike,
    capacity: int,
    *,
    dp: int,
    cost: Cost | None = None,
    num_microbatches: int | None = None,
    patches: npt.ArrayLike | None = None,
    max_patches: int | None = None,
) -> list[list[IntArray]]:
    """Distribute sequences so that all ranks have nearly equal work and no microbatch is above the capacity.

    Args:
        lengths: ints ``[S]``, slots of each sequence.
        capacity: most slots of a microbatch.
        dp: data-parallel ranks.
        cost: work of a sequence; the default fits a model with hidden size 4096.
        num_microbatches: microbatches of each rank; None takes the fewest that are found, or one more if
            ``max_patches`` makes the work uneven.
        patches: image patches of each sequence, ints ``[S]``, or ``[S, 2]`` with the sum over frames of
            squared patch counts; None for text.
        max_patches: most patches of a microbatch; None sets no bound.

    Returns:
        A list of microbatches per rank, the same number for all. Each is an int64 array of positions in
        ``lengths``, the longest sequence first.
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
            f"Sequence {longest} has {values[longest]} tokens but capacity={capacity}. Raise capacity."
        )
    media = None if patches is None else media_table(patches, len(values))
    work = (Cost() if cost is None else cost)(values, media)
    slots = Slots(usable=int(capacity), multiple=1, patches=check_patches(max_patches))
    images = np.zeros_like(values) if media is None else media[:, 0]
    if len(values) and images.max() > slots.patches:
        raise ValueError(too_many_patches(int(images.argmax()), int(images.max()), slots.patches))
    order, offsets = balanced_bins(
        values, work, slots, dp=dp, num_microbatches=num_microbatches, patches=images
    )
    bins = np.split(order, offsets[1:-1])
    each = len(bins) // dp
    return [bins[rank * each : (rank + 1) * each] for rank in range(dp)]


def balanced_bins(
    lengths: IntArray,  # a sequence above the capacity gets a bin of its own
    work: FloatArray,
    slots: Slots,
    *,
    dp: int,
    num_microbatches: int | None = None,  # None takes the fewest that are found
    given: Packing | None = None,  # packs to use instead of those of best fit
    patches: IntArray | None = None,
) -> tuple[IntArray, IntArray]:
    """Put sequences in bins of equal work; return positions ``[S]`` by rank and microbatch, and offsets."""
    if patches is None:
        slots, patches = replace(slots, patches=UNBOUNDED), np.zeros_like(lengths)
    # A sequence that is too large takes a whole bin, so that no other sequence joins it.
    over = (lengths > slots.usable) | (patches > slots.patches)
    step = Problem(np.where(over, slots.usable, lengths), np.where(over, 0, patches), work, slots, dp)
    count = dp * (step.fewest() if num_microbatches is None else num_microbatches)
    spread = owner, even = step.spread(count)
    if owner is None or not even:
        packs = best_fit(step.lengths, slots, step.patches) if given is None else given
        least = max(1, -(-len(packs) // dp))
        wanted = dp * (least if num_microbatches is None else num_microbatches)
        owner, count = step.best(wanted, packs, spread if wanted == count else None), wanted
        if owner is None:
            raise ValueError(
                f"{len(lengths)} sequences need {len(packs)} packs of {slots.usable} slots but dp={dp} with "
                f"num_microbatches={num_microbatches} has {wanted}. Pass num_microbatches={least}, or None."
            )
        waits = step.waits(owner, count)
        # Bins whose patches are at the bound may leave no room to make the work equal. More bins have room.
        if slots.patches < UNBOUNDED and num_microbatches is None and waits > step.least * _UNEVEN:
            roomier = step.best(count + dp, packs)
            if roomier is not None and step.waits(roomier, count + dp) * _UNEVEN < waits:
                owner, count = roomier, count + dp
    # Longest first inside a bin, because attention runs neighbours of equal length as one batch.
    order = np.lexsort((-lengths, owner))
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(owner, minlength=count), out=offsets[1:])
    return order_by_rank(order, offsets, step.bin_work(owner, count), dp)


@dataclass(frozen=True, slots=True)
class Problem:
    """The sequences of a step, the slots and patches that a bin may hold, and the number of ranks."""

    lengths: IntArray  # slots of each sequence
    patches: IntArray  # image patches of each sequence
    work: FloatArray
    slots: Slots
    dp: int

    @property
    def bounds(self) -> list[tuple[IntArray, int]]:
        """Return the slots of each sequence and the most slots of a bin, then patches if they are bounded."""
        slots = [(self.lengths, self.slots.usable)]
        return slots if self.slots.patches == UNBOUNDED else [*slots, (self.patches, self.slots.patches)]

    @property
    def least(self) -> float:
        """Return a lower bound of :func:`waiting`: the larger of an even share and the largest work."""
        return max(float(self.work.sum()) / self.dp, float(self.work.max(initial=0.0)))

    def fewest(self) -> int:
        """Return the number of microbatches per rank if every microbatch were full."""
        full = max(-(-int(sizes.sum()) // most) for sizes, most in self.bounds)
        return max(1, -(-full // self.dp))

    def bin_work(self, owner: IntArray, count: int) -> FloatArray:
        """Return the work of each bin, float64 ``[count]``; ``owner`` is the bin of each sequence."""
        return np.bincount(owner, weights=self.work, minlength=count).astype(np.float64)

    def waits(self, owner: IntArray, count: int) -> float:
        """Return the duration of a step in units of work, see :func:`waiting`."""
        return waiting(self.bin_work(owner, count), self.dp)

    def spread(self, count: int) -> tuple[IntArray | None, bool]:
        """Place sequences by work; return their bins (None if one does not fit), and whether work is even."""
        items, room = _items(self), (self.slots.usable, self.slots.patches)
        best, least = None, np.inf
        for below in (np.zeros(count), _levels(items, self.dp, count // self.dp)):
            if best is not None and not below.any():
                break
            owner = _most_work_first(items, room, below)
            if owner is not None and (waits := self.waits(owner, count)) < least:
                best, least = owner, waits
            if least <= self.least * _EVEN_ENOUGH:
                return best, True
        return best, False

    def best(
        self, count: int, packs: Packing, spread: tuple[IntArray | None, bool] | None = None
    ) -> IntArray | None:
        """Return the fastest of three plans, by work, best fit or microsteps; None if all need more bins."""
        filled, even = spread or self.spread(count)
        if filled is not None and even:
            return filled
        packed = None
        if len(packs) <= count:
            packed = np.empty(len(self.work), np.int64)
            packed[packs.indices] = np.repeat(np.arange(len(packs)), np.diff(packs.offsets))
        level = fill_microsteps(self, count // self.dp, enough=self.least * _EVEN_ENOUGH)
        found = [owner for owner in (filled, packed, level) if owner is not None]
        return min(found, key=lambda owner: self.waits(owner, count), default=None)


def _levels(items: list[_Item], dp: int, num_microbatches: int) -> FloatArray:
    """Return how much less work each bin should get than the heaviest bin, float64 ``[bins]``."""
    # The largest sequences set the work of the first microsteps. The rest of the work is shared equally.
    below, left, highest = np.zeros(dp * num_microbatches), sum(item[0] for item in items), 0.0
    for step in range(num_microbatches):
        mean = left / (dp * (num_microbatches - step))
        largest = items[step * dp][0] if step * dp < len(items) else 0.0
        level = max(mean, largest)
        highest = max(highest, level)
        below[step * dp :] = highest - level
        if largest <= mean:
            break
        left -= dp * level
    return below


def order_by_rank(
    order: IntArray, offsets: IntArray, totals: FloatArray, dp: int
) -> tuple[IntArray, IntArray]:
    """Reorder bins by the rank and microbatch that :func:`assign_bins` gives them."""
    members, ends = regrouped(offsets, assign_bins(totals, dp))
    return order[members], ends


def scheduled_bins(
    scheduler: Scheduler,
    lengths: IntArray,
    slots: Slots,
    *,
    dp: int,
    cost: Cost,
    patches: IntArray | None = None,
) -> tuple[IntArray, IntArray]:
    """Call a user's scheduler; check that sequences fit and come once, with equally many bins per rank."""
    plan = [
        [np.asarray(bin_, np.int64) for bin_ in rank]
        for rank in scheduler(lengths, slots.usable, dp=dp, cost=cost)
    ]
    numbers = sorted({len(rank) for rank in plan})
    if len(plan) != dp or len(numbers) != 1 or numbers[0] < 1:
        raise ValueError(
            f"The scheduler gave {len(plan)} ranks {numbers} microbatches; wanted {dp} with equally many."
        )
    bins = [bin_ for rank in plan for bin_ in rank]
    order = np.concatenate([np.empty(0, np.int64), *bins])
    if sorted(order.tolist()) != list(range(len(lengths))):
        raise ValueError(
            f"The scheduler used {order.tolist()[:9]}; it must use each of {len(lengths)} positions once."
        )
    bounds = [("slots", lengths, slots.usable)]
    if patches is not None:
        bounds.append(("patches", patches, slots.patches))
    for number, bin_ in enumerate(bins):
        for what, sizes, most in bounds:
            if sizes[bin_].sum() > most and len(bin_) > 1:
                raise ValueError(
                    f"The scheduler put {sizes[bin_].sum()} {what} in microbatch {number % numbers[0]} of "
                    f"rank {number // numbers[0]}, above the {most} that fit. Fill it with fewer sequences."
                )
    return order, np.concatenate([[0], np.cumsum([len(bin_) for bin_ in bins])])


def _most_work_first(items: list[_Item], room: tuple[int, int], below: FloatArray) -> IntArray | None:
    """Put each item in the bin with room and least work + ``below``; None if one fits nowhere."""
    heap = [(load, i) for i, load in enumerate(below.tolist())]
    heapq.heapify(heap)
    free_slots, free_patches = [room[0]] * len(heap), [room[1]] * len(heap)
    owner = np.empty(len(items), np.int64)
    for work_of, size, patches, item in items:
        tried = []
        while heap:
            load, i = heapq.heappop(heap)
            if free_slots[i] >= size and free_patches[i] >= patches:
                break
            tried.append((load, i))
        else:
            return None
        owner[item] = i
        free_slots[i] -= size
        free_patches[i] -= patches
        for other in tried:
            heapq.heappush(heap, other)
        heapq.heappush(heap, (load + work_of, i))
    return owner


def assign_bins(totals: FloatArray, dp: int) -> IntArray:
    """Assign bins to ranks and microbatches, so that bins of similar work run at the same time."""
    ranked = np.argsort(-totals, kind="stable").reshape(-1, dp)
    load = np.zeros(dp)
    assigned = np.empty((dp, len(ranked)), np.int64)
    for step, group in enumerate(ranked):
        ranks = np.argsort(load, kind="stable")
        assigned[ranks, step] = group
        load[ranks] += totals[group]
    return assigned.reshape(-1)


# The level of a microstep is the work to which its bins are filled. These levels are tried, in units of the
# mean work left for a bin. A higher level leaves fewer and shorter sequences to the last microstep.
_LEVELS = (1.0, 1.04, 1.08, 1.12, 1.16, 1.2, 1.24, 1.32)
_HIGHEST = 1.2  # The last microstep is filled to at most 1.2 times its lowest possible level.
_PRECISION = 0.003  # The level of the last microstep is found to 0.3 %.
_LEAST_GAIN = 1e-9  # A smaller gain, in units of a microstep's heaviest bin, is rounding.
_EXCHANGES = 100  # At most 100 exchanges, of about 25 us each, improve the best plan.

_Item = tuple[float, int, int, int]  # (work, slots, patches, position), sorted by falling work
_Bin = tuple[float, int, int, int]  # (work left, slots left, patches left, index of the bin)


def _items(step: Problem) -> list[_Item]:
    order = np.argsort(-step.work, kind="stable")
    columns = (step.work[order], step.lengths[order], step.patches[order], order)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def fill_microsteps(step: Problem, num_microbatches: int, *, enough: float) -> IntArray | None:
    """Fill microsteps by best fit in work, the heaviest first; None if no level holds all sequences."""
    items = _items(step)
    room = step.slots.usable, step.slots.patches
    search = _Search(room=room, dp=step.dp, microsteps=num_microbatches)
    total = sum(item[0] for item in items)
    start = search.fill_forced(_Partial(owner=[0] * len(items), left=items, total=total, filled=0, waits=0.0))
    best, least, below = None, np.inf, np.inf
    for level in _LEVELS:
        plan = search.fill_level(start, level, below=below)
        if plan is None:
            continue
        below = min(below, plan.waits)
        owner = np.array(plan.owner, dtype=np.int64)
        waits = step.waits(owner, step.dp * num_microbatches)
        if waits < least:
            best, least = owner, waits
        if least <= enough or start.filled == num_microbatches - 1:  # these levels are not for the last
            break
    if best is not None and least > enough:
        exchange(step, best, num_microbatches)
    return best


def exchange(step: Problem, owner: IntArray, num_microbatches: int) -> None:
    """Exchange sequences of the heaviest bins for sequences with less work, or for none; update ``owner``."""
    # Each exchange takes work from the heaviest bin of a microstep; the one furthest above its microstep's
    # mean comes first. The best exchange leaves both its bins furthest below the previous maxima.
    work, dp, bounds, bins = step.work, step.dp, step.bounds, step.dp * num_microbatches
    loads = step.bin_work(owner, bins)
    held = [np.bincount(owner, weights=each, minlength=bins).astype(np.int64) for each, _ in bounds]
    steps = loads.reshape(num_microbatches, dp)  # a view: follows loads
    heaviest, mean = steps.max(1), steps.mean(1)
    # A bin gives one of its sequences in exchange, or nothing. So the arrays end with a zero for each bin.
    given_work = np.append(work, np.zeros(bins))
    given = [np.append(each, np.zeros(bins, np.int64)) for each, _ in bounds]
    place = np.append(owner, np.arange(bins))
    open_, changed = np.ones(num_microbatches, bool), False
    for _ in range(_EXCHANGES):
        at = int(np.where(open_, heaviest - mean, -1.0).argmax())
        heavy = at * dp + int(steps[at].argmax())
        mine = np.flatnonzero(place[: len(owner)] == heavy)
        moved = work[mine][:, None] - given_work
        grown = [each[mine][:, None] - other for (each, _), other in zip(bounds, given, strict=True)]
        # By how much the two bins would exceed the heaviest bins of their microsteps; the larger excess.
        above = np.maximum(
            (loads[heavy] - heaviest[at]) - moved, (loads - np.repeat(heaviest, dp))[place] + moved
        )
        fits = moved > 0
        for (_, most), now, more in zip(bounds, held, grown, strict=True):
            fits &= (now[place] + more <= most) & (now[heavy] - more <= most)
        above[~fits | (place == heavy)] = np.inf
        i, other = divmod(int(above.argmin()), len(place)) if len(mine) else (0, 0)
        if not len(mine) or above[i, other] >= -_LEAST_GAIN * heaviest[at]:
            open_[at] = False
            if not open_.any() and not changed:
                break
            if not open_.any():  # try all again, because later exchanges may have made room
                open_[:], changed = True, False
            continue
        changed = True
        taken, target = mine[i], int(place[other])
        loads[[heavy, target]] += np.array([-1, 1]) * moved[i, other]
        for now, more in zip(held, grown, strict=True):
            now[[heavy, target]] += np.array([-1, 1]) * more[i, other]
        place[taken] = target
        if other < len(owner):
            place[other] = heavy
        for number in {at, target // dp}:
            heaviest[number], mean[number] = steps[number].max(), steps[number].mean()
    owner[:] = place[: len(owner)]


def waiting(totals: FloatArray, dp: int) -> float:
    """Return the duration of a step in units of work: the sum over microsteps of the heaviest bin."""
    return float(np.sort(totals)[::-1][::dp].sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Partial:
    """A plan whose first microsteps are filled."""

    owner: list[int]  # the bin of each position
    left: list[_Item]  # items in no bin yet
    total: float  # work of the items in no bin yet
    filled: int  # number of filled microsteps
    waits: float  # the sum of the heaviest bins of the filled microsteps


@dataclass(frozen=True, kw_only=True, slots=True)
class _Search:
    room: tuple[int, int]  # slots and patches of a bin
    dp: int
    microsteps: int

    def fill_forced(self, plan: _Partial) -> _Partial:
        """Fill the first microsteps, whose largest sequence is above every level that is tried."""
        last = self.microsteps - 1
        while plan.filled < last and plan.left and plan.left[0][0] >= self._mean(plan) * _LEVELS[-1]:
            plan = self._next(plan, plan.left[0][0])
        return plan

    def fill_level(self, plan: _Partial, level: float, *, below: float) -> _Partial | None:
        """Fill the other microsteps to ``level`` times their mean; None if not all fit within ``below``."""
        while plan.filled < self.microsteps - 1 and plan.left:
            plan = self._next(plan, max(plan.left[0][0], self._mean(plan) * level))
        return self._last(plan, below - plan.waits) if plan.left else plan

    def _mean(self, plan: _Partial) -> float:
        return plan.total / ((self.microsteps - plan.filled) * self.dp)

    def _next(self, plan: _Partial, level: float) -> _Partial:
        owner = plan.owner.copy()
        first = plan.filled * self.dp
        left, heaviest, placed = _fill(plan.left, level, self.room, owner, range(first, first + self.dp))
        total, waits = plan.total - placed, plan.waits + heaviest
        return _Partial(owner=owner, left=left, total=total, filled=plan.filled + 1, waits=waits)

    def _last(self, plan: _Partial, below: float) -> _Partial | None:
        """Find by bisection the lowest level at which the last microstep holds the remaining sequences."""
        low = max(plan.left[0][0], self._mean(plan))
        high = min(low * _HIGHEST, below)
        found = None
        while found is None or high - low > low * _PRECISION:
            middle = high if found is None else (low + high) / 2
            trial = self._next(plan, middle)
            if not trial.left:
                found, high = trial, middle
            elif found is None:
                return None
            else:
                low = middle
        return found if found.waits < plan.waits + below else None


def _fill(
    items: list[_Item], level: float, room_of_bin: tuple[int, int], owner: list[int], numbers: range
) -> tuple[list[_Item], float, float]:
    """Put items, the most work first, in the bins that they fill closest to the level."""
    level *= 1 + 1e-12  # sums are rounded
    least = items[-1][0]
    bins: list[_Bin] = []
    left: list[_Item] = []
    fresh = iter(numbers)
    tightest, placed = level, 0.0
    at = 0
    while at < len(items):
        work, slots, patches, position = items[at]
        spot = bisect_left(bins, (work,))
        while spot < len(bins) and (bins[spot][1] < slots or bins[spot][2] < patches):
            spot += 1
        if spot < len(bins):
            room, free_slots, free_patches, number = bins.pop(spot)
        elif (number := next(fresh, -1)) >= 0:
            room, (free_slots, free_patches) = level, room_of_bin
        else:  # skip to the first item that the bin with the most room could take
            roomiest = bins[-1][0] if bins else 0.0
            beyond = max(at + 1, bisect_left(items, -roomiest, lo=at, key=lambda item: -item[0]))
            left += items[at:beyond]
            at = beyond
            continue
        owner[position] = number
        room -= work
        placed += work
        tightest = min(tightest, room)
        if room >= least:
            insort(bins, (room, free_slots - slots, free_patches - patches, number))
        at += 1
    return left, level - tightest, placed  # items left, work of the fullest bin, work of all items placed
