"""The sequences of a step -> equally many microbatches per rank, of equal work and within the capacity.

A microstep is the microbatches that all ranks run at the same time. A step waits for the heaviest microbatch
of every microstep. So microbatches need not be equal across microsteps, only within one: the longest
sequences stay together in a heavy microstep, and shorter ones fill its gaps.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
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

MOST_MICROBATCHES = 2**24  # A step of more microbatches, over all ranks, is a mistake.
_UNEVEN = 1.05  # If ranks wait for 5 % more than an even share, one more microbatch is tried.
_EVEN_ENOUGH = 1.01  # A plan whose ranks wait for at most 1 % more than an even share is not improved.


class Scheduler(Protocol):
    """The interface of a user's own scheduler: the signature of :func:`balance`."""

    def __call__(
        self, lengths: IntArray, capacity: int, *, dp: int, cost: Cost
    ) -> Sequence[Sequence[npt.ArrayLike]]:
        """Return a list of microbatches per rank; each holds its sequences' positions in ``lengths``."""
        ...


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
    """Distribute sequences so that all ranks have equal work and no microbatch is above the capacity.

    Args:
        lengths: ints ``[S]``, slots of each sequence.
        capacity: most slots of a microbatch.
        dp: data-parallel ranks.
        cost: work of a sequence; the default is that of a model with hidden size 4096.
        num_microbatches: microbatches of each rank; None takes the fewest that hold everything.
        patches: image patches of each sequence, ints ``[S]``, or ``[S, 2]`` with the sum of their squares
            over frames; None for text.
        max_patches: most patches of a microbatch; None sets no bound.

    Returns:
        A list of microbatches per rank, equally many on all. Each is an int64 array of positions in
        ``lengths``, the longest sequence first.

    Raises:
        ValueError: if a sequence is above the capacity or ``max_patches``, or ``num_microbatches`` cannot
            hold all sequences.
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
    seen = np.zeros_like(values) if media is None else media[:, 0]
    if len(values) and seen.max() > slots.patches:
        raise ValueError(too_many_patches(int(seen.argmax()), int(seen.max()), slots.patches))
    order, offsets = balanced_bins(
        values, work, slots, dp=dp, num_microbatches=num_microbatches, patches=seen
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
    num_microbatches: int | None = None,  # None takes the fewest that best fit needs
    given: Packing | None = None,  # a fallback: packs that are known to be few enough
    patches: IntArray | None = None,
) -> tuple[IntArray, IntArray]:
    """Put sequences in bins of equal work; return positions ``[S]`` by rank and microbatch, and offsets."""
    sizes, seen = lengths, bounded(patches, slots)
    over = lengths > slots.usable if seen is None else (lengths > slots.usable) | (seen.patches > seen.most)
    if over.any():  # each of these fills a bin, so that nothing joins it
        sizes = np.where(over, slots.usable, lengths)
        seen = None if seen is None else Seen(np.where(over, 0, seen.patches), seen.most)
    step = _Step(sizes, work, slots.usable, dp, seen)
    count = dp * (step.fewest() if num_microbatches is None else num_microbatches)
    spread = owner, even = step.spread(count)
    if owner is None or not even:
        packs = best_fit(sizes, slots, None if seen is None else seen.patches) if given is None else given
        least = max(1, -(-len(packs) // dp))
        wanted = dp * (least if num_microbatches is None else num_microbatches)
        if len(packs) > wanted:
            raise ValueError(
                f"{len(lengths)} sequences need {len(packs)} packs of {slots.usable} slots but dp={dp} with "
                f"num_microbatches={num_microbatches} has {wanted}. Pass num_microbatches={least}, or None."
            )
        owner, count = step.best(wanted, packs, spread if wanted == count else None), wanted
        waits = step.waits(owner, count)
        # Packs full of patches may leave no room for equal work.
        if seen is not None and num_microbatches is None and waits > step.least * _UNEVEN:
            roomier = step.best(count + dp, packs)
            if step.waits(roomier, count + dp) * _UNEVEN < waits:
                owner, count = roomier, count + dp
    # Longest first inside a bin: attention reads sequences of equal length side by side as one batch.
    order = np.lexsort((-lengths, owner))
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(owner, minlength=count), out=offsets[1:])
    return seated(order, offsets, step.bin_work(owner, count), dp)


@dataclass(frozen=True, slots=True)
class Seen:
    """The image patches of sequences, int64 ``[S]``, and the most patches of a bin."""

    patches: IntArray
    most: int


def bounded(patches: IntArray | None, slots: Slots) -> Seen | None:
    """Return the patches and their bound, or None if there is no bound."""
    return None if patches is None or slots.patches == UNBOUNDED else Seen(patches, slots.patches)


@dataclass(frozen=True, slots=True)
class _Step:
    """The slots and work of a step's sequences, what a bin holds, and the number of ranks."""

    lengths: IntArray
    work: FloatArray
    capacity: int
    dp: int
    seen: Seen | None

    @property
    def least(self) -> float:
        """Return the least work that any plan waits for: an even share or the largest sequence."""
        return max(float(self.work.sum()) / self.dp, float(self.work.max(initial=0.0)))

    def fewest(self) -> int:
        """Return the number of microbatches per rank if every pack were full."""
        full = -(-int(self.lengths.sum()) // self.capacity)
        if self.seen is not None:
            full = max(full, -(-int(self.seen.patches.sum()) // self.seen.most))
        return max(1, -(-full // self.dp))

    def bin_work(self, owner: IntArray, count: int) -> FloatArray:
        return np.bincount(owner, weights=self.work, minlength=count).astype(np.float64)

    def waits(self, owner: IntArray, count: int) -> float:
        return waiting(self.bin_work(owner, count), self.dp)

    def spread(self, count: int) -> tuple[IntArray | None, bool]:
        """Place items, most work first; return the bins (None if one does not fit) and if they are even."""
        items = _items(self.lengths, self.work, self.seen)
        room = self.capacity, UNBOUNDED if self.seen is None else self.seen.most
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
    ) -> IntArray:
        """Choose the plan that waits least: filled by work, by best fit, or microstep by microstep."""
        filled, even = spread or self.spread(count)
        if filled is not None and even:
            return filled
        packed = np.empty(len(self.work), np.int64)
        packed[packs.indices] = np.repeat(np.arange(len(packs)), np.diff(packs.offsets))
        level = fill_microsteps(
            self.lengths,
            self.work,
            self.capacity,
            dp=self.dp,
            num_microbatches=count // self.dp,
            enough=self.least * _EVEN_ENOUGH,
            seen=self.seen,
        )
        found = [owner for owner in (filled, packed, level) if owner is not None]
        return min(found, key=lambda owner: self.waits(owner, count))


def _levels(items: list[_Item], dp: int, num_microbatches: int) -> FloatArray:
    """Return how far each bin should stay below the heaviest bin, float64 ``[bins]``."""
    # The largest sequences set the levels of the first microsteps. The rest of the work is shared equally.
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


def seated(order: IntArray, offsets: IntArray, totals: FloatArray, dp: int) -> tuple[IntArray, IntArray]:
    """Reorder bins by rank and microbatch, as :func:`deal` assigns them by their work."""
    members, ends = regrouped(offsets, deal(totals, dp))
    return order[members], ends


def scheduled_bins(
    scheduler: Scheduler,
    lengths: IntArray,
    capacity: int,
    *,
    dp: int,
    cost: Cost,
    seen: Seen | None = None,
) -> tuple[IntArray, IntArray]:
    """Call a user's scheduler, and check that its plan is complete, fits and is even."""
    plan = [
        [np.asarray(bin_, np.int64) for bin_ in rank]
        for rank in scheduler(lengths, capacity, dp=dp, cost=cost)
    ]
    numbers = sorted({len(rank) for rank in plan})
    if len(plan) != dp or len(numbers) != 1 or numbers[0] < 1:
        raise ValueError(
            f"The scheduler planned {len(plan)} ranks with {numbers} microbatches; wanted {dp} equally long."
        )
    bins = [bin_ for rank in plan for bin_ in rank]
    order = np.concatenate([np.empty(0, np.int64), *bins])
    if sorted(order.tolist()) != list(range(len(lengths))):
        raise ValueError(
            f"The scheduler used {order.tolist()[:9]}; it must use each of {len(lengths)} positions once."
        )
    bounds = [("slots", lengths, capacity), *([] if seen is None else [("patches", seen.patches, seen.most)])]
    for number, bin_ in enumerate(bins):
        for what, sizes, most in bounds:
            if sizes[bin_].sum() > most and len(bin_) > 1:
                raise ValueError(
                    f"The scheduler put {sizes[bin_].sum()} {what} in microbatch {number % numbers[0]} of "
                    f"rank {number // numbers[0]}, above the {most} that fit. Fill it with fewer sequences."
                )
    return order, np.concatenate([[0], np.cumsum([len(bin_) for bin_ in bins])])


def _most_work_first(items: list[_Item], room: tuple[int, int], below: FloatArray) -> IntArray | None:
    """Put each item in the bin with the least work; bins start at ``below``. None if an item fits nowhere."""
    heap = [(load, i) for i, load in enumerate(below.tolist())]
    heapq.heapify(heap)
    slots, views = [room[0]] * len(heap), [room[1]] * len(heap)
    owner = np.empty(len(items), np.int64)
    for work_of, size, patches, item in items:
        tried = []
        while heap:
            load, i = heapq.heappop(heap)
            if slots[i] >= size and views[i] >= patches:
                break
            tried.append((load, i))
        else:
            return None
        owner[item] = i
        slots[i] -= size
        views[i] -= patches
        for other in tried:
            heapq.heappush(heap, other)
        heapq.heappush(heap, (load + work_of, i))
    return owner


def deal(totals: FloatArray, dp: int) -> IntArray:
    """Assign bins to ranks and microbatches: bins of like work run at the same time."""
    ranked = np.argsort(-totals, kind="stable").reshape(-1, dp)
    load = np.zeros(dp)
    assigned = np.empty((dp, len(ranked)), np.int64)
    for step, group in enumerate(ranked):
        ranks = np.argsort(load, kind="stable")
        assigned[ranks, step] = group
        load[ranks] += totals[group]
    return assigned.reshape(-1)


# Levels to try for groups (microsteps) whose level is not fixed by the longest sequence, in units of the mean
# remaining work. A higher level leaves fewer and shorter sequences to the last group. More levels gain 0.2 %.
_LEVELS = (1.0, 1.04, 1.08, 1.12, 1.16, 1.2, 1.24, 1.32)
_HIGHEST = 1.2  # The last group is filled to at most 1.2 times an even level.
_PRECISION = 0.003  # The last group's level is found to 0.3 %.
_LEAST_GAIN = 1e-9  # A smaller gain, in units of a microstep's heaviest bin, is rounding.
_EXCHANGES = 100  # At most 100 exchanges, of about 25 us each, improve the best plan.

_Item = tuple[float, int, int, int]  # (work, slots, patches, position), sorted by falling work
_Bin = tuple[float, int, int, int]  # (work left, slots left, patches left, number)


def _items(lengths: IntArray, work: FloatArray, seen: Seen | None) -> list[_Item]:
    """List work, slots, patches and position of sequences, the most work first."""
    order = np.argsort(-work, kind="stable")
    patches = np.zeros_like(order) if seen is None else seen.patches[order]
    columns = (work[order], lengths[order], patches, order)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def fill_microsteps(
    lengths: IntArray,
    work: FloatArray,
    capacity: int,
    *,
    dp: int,
    num_microbatches: int,
    enough: float,  # the first plan that waits for no more work than this is taken
    seen: Seen | None = None,
) -> IntArray | None:
    """Fill microsteps by best fit in work, the heaviest first; None when no level tried holds everything."""
    items = _items(lengths, work, seen)
    room = capacity, UNBOUNDED if seen is None else seen.most
    search = _Search(room=room, dp=dp, groups=num_microbatches)
    total = sum(item[0] for item in items)
    start = search.fill_forced(_Partial(owner=[0] * len(items), left=items, total=total, group=0, waits=0.0))
    best, least, below = None, np.inf, np.inf
    for level in _LEVELS:
        plan = search.fill_level(start, level, below=below)
        if plan is None:
            continue
        below = min(below, plan.waits)
        owner = np.array(plan.owner, dtype=np.int64)
        totals = np.bincount(owner, weights=work, minlength=dp * num_microbatches).astype(np.float64)
        waits = waiting(totals, dp)
        if waits < least:
            best, least = owner, waits
        if least <= enough or start.group == num_microbatches - 1:
            break
    if best is not None and least > enough:
        exchange(best, lengths, work, capacity, dp=dp, num_microbatches=num_microbatches, seen=seen)
    return best


def exchange(
    owner: IntArray,
    lengths: IntArray,
    work: FloatArray,
    capacity: int,
    *,
    dp: int,
    num_microbatches: int,
    seen: Seen | None = None,
) -> None:
    """Exchange sequences of the heaviest bins for others with less work, or for none; change ``owner``."""
    # Each exchange moves work out of the heaviest bin of one microstep, first where it is furthest above the
    # mean. The target is the bin that then remains furthest below the heaviest bin of its own microstep.
    bins = dp * num_microbatches
    loads = np.bincount(owner, weights=work, minlength=bins).astype(np.float64)
    bounds = [(lengths, capacity)] if seen is None else [(lengths, capacity), (seen.patches, seen.most)]
    held = [np.bincount(owner, weights=each, minlength=bins).astype(np.int64) for each, _ in bounds]
    steps = loads.reshape(num_microbatches, dp)  # a view: follows loads
    heaviest, mean = steps.max(1), steps.mean(1)
    # A bin can give any sequence in exchange, or nothing: hence one zero per bin.
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
        # How far the two bins would exceed the maxima of their microsteps: the larger of both numbers.
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
            if not open_.any():  # others may have made room
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
        for step in {at, target // dp}:
            heaviest[step], mean[step] = steps[step].max(), steps[step].mean()
    owner[:] = place[: len(owner)]


def waiting(totals: FloatArray, dp: int) -> float:
    """Sum the work of the heaviest bin of every microstep, if bins of like work run together."""
    return float(np.sort(totals)[::-1][::dp].sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Partial:
    """A partly filled plan: the microsteps filled so far."""

    owner: list[int]  # the bin of each position
    left: list[_Item]  # items in no bin yet
    total: float  # their work
    group: int  # microsteps planned
    waits: float  # work waited for in them


@dataclass(frozen=True, kw_only=True, slots=True)
class _Search:
    room: tuple[int, int]  # slots and patches of a bin
    dp: int
    groups: int

    def fill_forced(self, plan: _Partial) -> _Partial:
        """Fill the groups whose level is fixed by their longest sequence, at every level tried."""
        while (
            plan.group < self.groups - 1 and plan.left and plan.left[0][0] >= self._mean(plan) * _LEVELS[-1]
        ):
            plan = self._next(plan, plan.left[0][0])
        return plan

    def fill_level(self, plan: _Partial, level: float, *, below: float) -> _Partial | None:
        """Fill the other groups to a multiple of their mean; None if ranks would wait ``below`` or longer."""
        while plan.group < self.groups - 1 and plan.left:
            plan = self._next(plan, max(plan.left[0][0], self._mean(plan) * level))
        return self._last(plan, below - plan.waits) if plan.left else plan

    def _mean(self, plan: _Partial) -> float:
        return plan.total / ((self.groups - plan.group) * self.dp)

    def _next(self, plan: _Partial, level: float) -> _Partial:
        owner = plan.owner.copy()
        first = plan.group * self.dp
        left, heaviest, placed = _fill(plan.left, level, self.room, owner, range(first, first + self.dp))
        total, waits = plan.total - placed, plan.waits + heaviest
        return _Partial(owner=owner, left=left, total=total, group=plan.group + 1, waits=waits)

    def _last(self, plan: _Partial, below: float) -> _Partial | None:
        """Find by bisection the lowest level of work at which the remaining sequences fit one group."""
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
    """Put items, heaviest first, in the bin they fill closest to the level, and note the bin in ``owner``."""
    level *= 1 + 1e-12  # room for the rounding of sums
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
            room, free, views, number = bins.pop(spot)
        elif (number := next(fresh, -1)) >= 0:
            room, (free, views) = level, room_of_bin
        else:  # on to the first item that the roomiest bin could take
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
            insort(bins, (room, free - slots, views - patches, number))
        at += 1
    return left, level - tightest, placed
