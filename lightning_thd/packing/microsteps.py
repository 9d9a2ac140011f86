"""Sequences -> bins grouped in microsteps of dp bins, each group filled to one level of work.

What a step waits for is the heaviest bin of every microstep. So bins need not be equal across microsteps,
only inside one: the longest sequences are left together in a heavy microstep, and shorter ones fill its gaps.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

# Levels tried for the groups that the longest sequence does not dictate, as multiples of the mean work left:
# a higher one leaves the last group fewer and shorter sequences. More than these gain less than 0.2 %.
_LEVELS = (1.0, 1.04, 1.08, 1.12, 1.16, 1.2, 1.24, 1.32)
_HIGHEST = 1.2  # of an even level: the last group is not tried above it
_PRECISION = 0.003  # of the last group's level
_LEAST_GAIN = 1e-9  # of a microstep's heaviest bin: less is rounding
_EXCHANGES = 100  # most that are tried on the best plan, some 25 us each

_Item = tuple[float, int, int]  # (work, slots, position), sorted by falling work
_Bin = tuple[float, int, int]  # (work left, slots left, number)


def fill_microsteps(
    lengths: IntArray, work: FloatArray, capacity: int, *, dp: int, num_microbatches: int, enough: float
) -> IntArray | None:
    """Fill microstep after microstep by best fit in work, the heaviest first.

    Args:
        lengths: int64 ``[S]``, slots, at most ``capacity``.
        work: float64 ``[S]``.
        capacity: most slots of a bin.
        dp: bins of a microstep.
        num_microbatches: microsteps.
        enough: stop at the first plan that waits for no more work than this.

    Returns:
        int64 ``[S]``, the bin of each sequence, of the best level tried; None when none holds everything.
    """
    order = np.argsort(-work, kind="stable")
    items = list(zip(work[order].tolist(), lengths[order].tolist(), order.tolist(), strict=True))
    search = _Search(capacity=capacity, dp=dp, groups=num_microbatches)
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
        exchange(best, lengths, work, capacity, dp=dp, num_microbatches=num_microbatches)
    return best


def exchange(
    owner: IntArray, lengths: IntArray, work: FloatArray, capacity: int, *, dp: int, num_microbatches: int
) -> None:
    """Exchange sequences of heaviest bins for lighter ones, or for none, so that microsteps wait for less.

    Each exchange takes work off the heaviest bin of a microstep, the one that is furthest above its mean
    first, and gives it to the bin that it leaves furthest below the heaviest of its own microstep.

    Args:
        owner: int64 ``[S]``, the bin of each sequence; changed in place.
        lengths: int64 ``[S]``.
        work: float64 ``[S]``.
        capacity: most slots of a bin.
        dp: bins of a microstep.
        num_microbatches: microsteps.
    """
    bins = dp * num_microbatches
    loads = np.bincount(owner, weights=work, minlength=bins).astype(np.float64)
    slots = np.bincount(owner, weights=lengths, minlength=bins).astype(np.int64)
    steps = loads.reshape(num_microbatches, dp)  # a view: follows loads
    heaviest, mean = steps.max(1), steps.mean(1)
    # every sequence may come in exchange, and nothing out of every bin
    given_work, given_slots = np.append(work, np.zeros(bins)), np.append(lengths, np.zeros(bins, np.int64))
    place = np.append(owner, np.arange(bins))
    open_, changed = np.ones(num_microbatches, bool), False
    for _ in range(_EXCHANGES):
        at = int(np.where(open_, heaviest - mean, -1.0).argmax())
        heavy = at * dp + int(steps[at].argmax())
        mine = np.flatnonzero(place[: len(owner)] == heavy)
        moved, grown = work[mine][:, None] - given_work, lengths[mine][:, None] - given_slots
        # how far the heavier of the two bins ends above the heaviest of its microstep
        above = np.maximum(
            (loads[heavy] - heaviest[at]) - moved, (loads - np.repeat(heaviest, dp))[place] + moved
        )
        fits = (moved > 0) & (slots[place] + grown <= capacity) & (slots[heavy] - grown <= capacity)
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
        slots[[heavy, target]] += np.array([-1, 1]) * grown[i, other]
        place[taken] = target
        if other < len(owner):
            place[other] = heavy
        for step in {at, target // dp}:
            heaviest[step], mean[step] = steps[step].max(), steps[step].mean()
    owner[:] = place[: len(owner)]


def waiting(totals: FloatArray, dp: int) -> float:
    """Return the work of the heaviest bin of every microstep, summed, when bins of like work run together."""
    return float(np.sort(totals)[::-1][::dp].sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Partial:
    """A partly filled plan: the microsteps filled so far.

    Attributes:
        owner: the bin of each position.
        left: what is in no bin yet, and
        total: its work.
        group: microsteps planned.
        waits: work waited for in them.
    """

    owner: list[int]
    left: list[_Item]
    total: float
    group: int
    waits: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Search:
    capacity: int
    dp: int
    groups: int

    def fill_forced(self, plan: _Partial) -> _Partial:
        """Fill the groups whose level follows from their longest sequence, for any level tried."""
        while (
            plan.group < self.groups - 1 and plan.left and plan.left[0][0] >= self._mean(plan) * _LEVELS[-1]
        ):
            plan = self._next(plan, plan.left[0][0])
        return plan

    def fill_level(self, plan: _Partial, level: float, *, below: float) -> _Partial | None:
        """Fill the other groups to a multiple of their mean; None if that waits ``below`` or longer."""
        while plan.group < self.groups - 1 and plan.left:
            plan = self._next(plan, max(plan.left[0][0], self._mean(plan) * level))
        return self._last(plan, below - plan.waits) if plan.left else plan

    def _mean(self, plan: _Partial) -> float:
        return plan.total / ((self.groups - plan.group) * self.dp)

    def _next(self, plan: _Partial, level: float) -> _Partial:
        owner = plan.owner.copy()
        first = plan.group * self.dp
        left, heaviest, placed = _fill(plan.left, level, self.capacity, owner, range(first, first + self.dp))
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
    items: list[_Item], level: float, capacity: int, owner: list[int], numbers: range
) -> tuple[list[_Item], float, float]:
    """Put items, heaviest first, in the bin they fill closest to the level, and note the bin in ``owner``.

    Returns:
        The items that fit nowhere, the work of the heaviest bin, and that of all bins.
    """
    level *= 1 + 1e-12  # the rounding of sums
    least = items[-1][0]
    bins: list[_Bin] = []
    left: list[_Item] = []
    fresh = iter(numbers)
    tightest, placed = level, 0.0
    at = 0
    while at < len(items):
        work, slots, position = items[at]
        spot = bisect_left(bins, (work,))
        while spot < len(bins) and bins[spot][1] < slots:
            spot += 1
        if spot < len(bins):
            room, free, number = bins.pop(spot)
        elif (number := next(fresh, -1)) >= 0:
            room, free = level, capacity
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
            insort(bins, (room, free - slots, number))
        at += 1
    return left, level - tightest, placed
