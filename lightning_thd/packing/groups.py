"""The sequences of a step -> groups of ranks in each microbatch; the ranks of a group share one pack.

Every microbatch divides all ranks into groups of 1, 2, 4, ... neighbours. FSDP ranks wait for each other in
every microbatch, so each microbatch gets equal work on all ranks. DDP ranks wait only at the end of the step,
so each rank gets equal work over the step.

The *degree* of a group or sequence is its number of ranks. The *level* of a microbatch is the work to which
each of its ranks is filled. Legend: S sequences, G groups of all microbatches, C degrees; ``c`` is the index
of a degree, and ``n`` numbers the sequences of a step from the shortest.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lightning_thd._checks import host_ints, instance, whole_number
from lightning_thd.packing.degrees import FloatArray, IntArray, Sharing, Tables, check_tiling

_FULL = 0.96  # Microbatches are planned for this share of their slots; free slots make equal work possible.
_FEW = 0.1  # The last sequences get a new microbatch if they fill over a tenth of it, or fit in no other.
_WIDEST = 2.0  # The highest level that is tried, in units of the lowest.
_WORTH = 1.1  # A sequence fills up a group if its work at that degree is at most 1.1 times its least.
_ROUNDING = 1 + 1e-9  # Levels are raised by this factor, because sums of work are rounded.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DynamicBins:
    """The sequences of each group of ranks, and the ranks and microbatch that run them."""

    order: IntArray  # int64 ``[S]``, positions of the sequences, group after group
    offsets: IntArray  # int64 ``[G + 1]``, where each group begins in ``order``
    degree: IntArray  # int64 ``[G]``, ranks of each group
    first: IntArray  # int64 ``[G]``, first rank of each group
    microbatch: IntArray  # int64 ``[G]``, the microbatch in which each group runs
    load: FloatArray  # float64 ``[G]``, work of each rank of the group, including its exchange of keys
    num_microbatches: int  # microbatches of each rank, the same for all


def share_out(
    lengths: npt.ArrayLike,
    capacity: int,
    *,
    ranks: int,
    sharing: Sharing,
    cost: Callable[[IntArray], FloatArray],
) -> DynamicBins:
    """Assign a degree, a microbatch and ranks to every sequence of a step."""
    capacity = whole_number(capacity, "capacity", least=1, advice="It is the most slots of one rank.")
    instance(sharing, "sharing", Sharing, advice="Pass Sharing(max_degree=...).")
    check_tiling(ranks, sharing.max_degree)
    values = host_ints(lengths, "lengths", least=1, advice="Leave empty sequences out.")
    if not values.size:
        raise ValueError("lengths is empty: there is no sequence to share out. Pass the tokens of each.")

    tables = Tables.of(values, capacity, sharing, cost)
    if sharing.waits == "step":
        return _even_step(tables, ranks)
    return _even_microbatches(tables, ranks)


@dataclass(kw_only=True, slots=True, eq=False)
class _Group:
    """A group of ranks in one microbatch, while it is being filled."""

    c: int  # index of the degree in ``Tables.degrees``
    free: int  # slots left
    first: int = 0  # the first rank
    microbatch: int = 0  # the microbatch in which the group runs
    load: float = 0.0  # work of each rank
    members: list[int] = field(default_factory=list)  # positions of the sequences


class _Left:
    """The sequences of a step that are in no group yet, numbered from the shortest."""

    def __init__(self, tables: Tables) -> None:
        order = np.argsort(tables.slots[0], kind="stable")
        load = np.where(tables.possible, tables.load, np.inf)[:, order]
        worth = (tables.total_work <= _WORTH * tables.cheapest)[:, order]
        # Lists, because the loops below read single numbers, which is slow from arrays.
        self.order: list[int] = order.tolist()  # the position of each sequence
        self.slots: list[list[int]] = tables.slots[:, order].tolist()  # at every degree
        self.load: list[list[float]] = load.tolist()  # at every degree, infinite where it is too small
        # The most work among a sequence and all shorter ones: it never falls, as bisection requires.
        self.most: list[list[float]] = np.maximum.accumulate(load, axis=1).tolist()
        # At each degree, the shortest sequence that may join. The exchange costs longer ones a smaller share.
        self._shortest: list[int] = np.where(worth.any(axis=1), worth.argmax(axis=1), len(order)).tolist()
        self.work: list[float] = tables.cheapest[order].tolist()  # at the cheapest degree
        self.numbers = list(range(len(order)))  # the sequences in no group yet, ascending

    def longest(self, c: int, free: int, room: float) -> int:
        """Return the index in ``numbers`` of the longest sequence within the slots and work left, or -1."""
        fits = min(bisect_right(self.slots[c], free), bisect_right(self.most[c], room))
        return bisect_right(self.numbers, fits - 1) - 1

    def put(self, n: int, group: _Group) -> None:
        """Add a sequence to a group."""
        group.members.append(self.order[n])
        group.load += self.load[group.c][n]
        group.free -= self.slots[group.c][n]

    def fill(self, group: _Group, level: float) -> None:
        """Fill a group up to a level, with the longest sequences first."""
        while True:
            place = self.longest(group.c, group.free, level - group.load)
            if place < 0 or self.numbers[place] < self._shortest[group.c]:
                break
            self.put(self.numbers.pop(place), group)

    def spread(self, queues: Sequence[tuple[float, Sequence[_Group]]]) -> bool:
        """Put sequences, longest first, in the queue with room and least work; False if one fits nowhere."""
        # A queue is a rank's work so far and all its groups of degree 1. In ``_finish`` it is the load of one
        # group, minus its level, and this group. A full queue waits for a shorter sequence.
        free = [[group.free for group in groups] for _, groups in queues]
        heap = [(work, queue) for queue, (work, _) in enumerate(queues)]
        heapq.heapify(heap)
        waiting: list[tuple[int, float, int]] = []  # (-most free slots of a group, work, queue)
        placed: list[tuple[int, _Group]] = []
        for n in reversed(self.numbers):
            while waiting and -waiting[0][0] >= self.slots[0][n]:
                _, work, queue = heapq.heappop(waiting)
                heapq.heappush(heap, (work, queue))
            while heap:
                work, queue = heap[0]
                _, groups = queues[queue]
                most_free = max(free[queue], default=0)
                if groups and most_free >= self.slots[groups[0].c][n]:
                    break
                heapq.heappop(heap)
                heapq.heappush(waiting, (-most_free, work, queue))
            else:
                return False

            place = free[queue].index(most_free)
            group = groups[place]
            free[queue][place] -= self.slots[group.c][n]
            placed.append((n, group))
            heapq.heapreplace(heap, (work + self.load[group.c][n], queue))

        # Only now, so that the groups are unchanged if a sequence fits nowhere and the caller adds groups.
        for n, group in placed:
            self.put(n, group)
        self.numbers = []
        return True


def _bins(tables: Tables, groups: list[_Group]) -> DynamicBins:
    """Convert groups to arrays, by microbatch and then by rank."""
    groups = sorted(groups, key=lambda group: (group.microbatch, group.first))
    sizes = [len(group.members) for group in groups]
    return DynamicBins(
        order=np.array([position for group in groups for position in group.members]),
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        degree=np.array([tables.degrees[group.c] for group in groups]),
        first=np.array([group.first for group in groups]),
        microbatch=np.array([group.microbatch for group in groups]),
        load=np.array([group.load for group in groups]),
        num_microbatches=groups[-1].microbatch + 1,
    )


def _even_microbatches(tables: Tables, ranks: int) -> DynamicBins:
    """Fill one microbatch after another, each with the longest sequences that are left."""
    # A rank reaches the level of a long sequence only with sequences that are about as long: shorter ones
    # have less work per slot, so its slots run out first.
    left = _Left(tables)
    slots_of_microbatch = _FULL * ranks * tables.room[0]
    microbatches: list[list[_Group]] = []
    while left.numbers:
        needed = sum(left.slots[0][n] for n in left.numbers) / slots_of_microbatch
        mean = sum(left.work[n] for n in left.numbers) / ranks / math.ceil(needed)
        longest = left.numbers[-1]
        loads = [most[longest] for most in left.most]  # the longest sequence's, at every degree
        if needed <= 1 and loads[0] <= mean:
            _finish(left, microbatches, tables.room[0], ranks, added=int(needed > _FEW))
            break

        # Higher levels are those at which the longest sequence has a smaller degree.
        lowest = max(mean, min(loads))
        higher = [load for load in loads if lowest < load <= _WIDEST * lowest]
        trials = [_microbatch(left, tables, ranks, level) for level in sorted({lowest, *higher})]
        best = max(trials, key=lambda trial: trial.work_per_time)
        microbatches.append(best.groups)
        left = best.left

    for number, groups in enumerate(microbatches):
        first = 0
        # The largest groups come first, so that each begins at a multiple of its size.
        for group in sorted(groups, key=lambda group: (-group.c, -group.load)):
            group.first = first
            group.microbatch = number
            first += tables.degrees[group.c]
    return _bins(tables, [group for groups in microbatches for group in groups])


@dataclass(frozen=True, slots=True)
class _Trial:
    """A microbatch that was filled to one of several levels."""

    work_per_time: float  # work of its sequences, divided by the work of its slowest rank
    groups: list[_Group]
    left: _Left  # the sequences that are not in it


def _microbatch(left: _Left, tables: Tables, ranks: int, level: float) -> _Trial:
    """Fill a microbatch to a level, with the longest sequences first; ``left`` stays as it is."""
    rest = copy(left)  # shares all tables, which do not change
    rest.numbers = list(left.numbers)
    level *= _ROUNDING
    groups: list[_Group] = []
    while ranks:  # ranks that are in no group yet
        # The longest sequence that fits, and the least degree that holds it.
        place = -1
        c = 0
        for wider, degree in enumerate(tables.degrees):
            if degree > ranks or place == len(rest.numbers) - 1:
                break
            longest = rest.longest(wider, tables.room[wider], level)
            if longest > place:
                place = longest
                c = wider

        group = _Group(c=c, free=tables.room[c])
        if place >= 0:
            rest.put(rest.numbers.pop(place), group)
            rest.fill(group, level)
        groups.append(group)
        ranks -= tables.degrees[c]

    work = sum(left.work[n] for n in left.numbers) - sum(rest.work[n] for n in rest.numbers)
    return _Trial(work / max(group.load for group in groups), groups, rest)


def _finish(left: _Left, microbatches: list[list[_Group]], room: int, ranks: int, added: int) -> None:
    """Put the sequences left into groups below their level, and into ``added`` or more new microbatches."""
    work = sum(left.work[n] for n in left.numbers)
    levels = [max(group.load for group in groups) for groups in microbatches]
    while True:
        new = [[_Group(c=0, free=room) for _ in range(ranks)] for _ in range(added)]
        level_of_new = work / ranks / max(added, 1)
        queues = [
            (group.load - level, [group])
            for groups, level in zip([*microbatches, *new], levels + [level_of_new] * added, strict=True)
            for group in groups
        ]
        if left.spread(queues):
            microbatches += new
            return
        added += 1


def _even_step(tables: Tables, ranks: int) -> DynamicBins:
    """Give each sequence the fewest ranks on which its load is within an even share; then fill up groups."""
    # Each rank runs its largest groups first. So all ranks of a group have run the same larger groups before,
    # and no rank waits for another.
    even = tables.even_time(ranks)
    left = _Left(tables)
    # The least degree at which a sequence is within the even share, else the one at which it is fastest.
    load = np.where(tables.possible, tables.load, np.inf)
    within = load <= even
    fewest = np.where(within.any(axis=0), within.argmax(axis=0), load.argmin(axis=0))[left.order].tolist()

    groups: list[_Group] = []
    work = np.zeros(ranks)  # each rank's work so far
    used = np.zeros(ranks, dtype=np.int64)  # each rank's number of microbatches so far
    for c in range(len(tables.degrees) - 1, 0, -1):
        of_degree = [n for n in left.numbers if fewest[n] == c]
        left.numbers = [n for n in left.numbers if fewest[n] != c]
        for group in _groups_of_degree(left, tables, c, of_degree[::-1], work, used):
            before = group.load
            left.fill(group, before + even - float(work[group.first]))
            work[group.first : group.first + tables.degrees[c]] += group.load - before
            groups.append(group)

    # The rest runs at degree 1. A rank needs slots in proportion to the work that it can still take.
    slots = sum(left.slots[0][n] for n in left.numbers)
    share = np.maximum(even - work, 1e-9 * even)  # above 0, because the shares are divided by their sum
    needed = np.ceil(slots / (_FULL * tables.room[0]) * share / share.sum() - 1e-9)  # 1e-9 is for rounding
    count = max(1, int((used + needed).max()))  # microbatches of each rank
    while True:
        queues = [
            [_Group(c=0, free=tables.room[0], first=rank, microbatch=j) for j in range(begun, count)]
            for rank, begun in enumerate(used.tolist())
        ]
        if left.spread(list(zip(work.tolist(), queues, strict=True))):
            return _bins(tables, groups + [group for queue in queues for group in queue])
        count += 1


def _groups_of_degree(
    left: _Left, tables: Tables, c: int, numbers: list[int], work: FloatArray, used: IntArray
) -> list[_Group]:
    """Put sequences into groups of a degree, on the ranks with least work; update ``work`` and ``used``."""
    size = tables.degrees[c]
    groups: dict[int, list[_Group]] = {first: [] for first in range(0, len(work), size)}  # by first rank
    heap = [(float(work[first]), first) for first in groups]
    heapq.heapify(heap)
    for n in numbers:
        work_so_far, first = heap[0]
        with_room = (group for group in groups[first] if group.free >= left.slots[c][n])
        group = next(with_room, None)
        if group is None:
            group = _Group(c=c, free=tables.room[c], first=first, microbatch=int(used[first]))
            groups[first].append(group)
            used[first : first + size] += 1
        left.put(n, group)
        heapq.heapreplace(heap, (work_so_far + left.load[c][n], first))

    for work_so_far, first in heap:
        work[first : first + size] = work_so_far
    return [group for of_ranks in groups.values() for group in of_ranks]
