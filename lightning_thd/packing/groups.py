"""The sequences of a step -> groups of ranks in each microbatch; the ranks of a group share one pack.

Every microbatch divides all ranks into groups of 1, 2, 4, ... neighbours. FSDP ranks wait for each other in
every microbatch, so each microbatch gets equal work on all ranks. DDP ranks wait only at the end of the step,
so each rank gets equal work over the step.

The *degree* of a group or sequence is its number of ranks. The *level* of a microbatch is the work to which
each of its ranks is filled. Legend: S sequences, G groups of all microbatches.
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
class SharedBins:
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
) -> SharedBins:
    """Assign a degree, a microbatch and ranks to every sequence of a step."""
    capacity = whole_number(capacity, "capacity", least=1, advice="It is the most slots of one rank.")
    instance(sharing, "sharing", Sharing, advice="Pass Sharing(max_degree=...).")
    check_tiling(ranks, sharing.max_degree)
    values = host_ints(lengths, "lengths", least=1, advice="Leave empty sequences out.")
    if not values.size:
        raise ValueError("lengths is empty: there is no sequence to share out. Pass the tokens of each.")
    tables = Tables.of(values, capacity, sharing, cost)
    return _even_step(tables, ranks) if sharing.waits == "step" else _even_microbatches(tables, ranks)


@dataclass(kw_only=True, slots=True, eq=False)
class _Group:
    """A group of ranks in one microbatch, while it is being filled."""

    at: int  # index of the degree
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
        self.order: list[int] = order.tolist()
        self.slots, self.load = tables.slots[:, order].tolist(), load.tolist()  # at every degree
        # The most work among a sequence and all shorter ones: it never falls, as bisection requires.
        self.most = np.maximum.accumulate(load, axis=1).tolist()
        # At each degree, the shortest sequence that may join. The exchange costs longer ones a smaller share.
        self._shortest = np.where(worth.any(axis=1), worth.argmax(axis=1), len(order)).tolist()
        self.work: list[float] = tables.cheapest[order].tolist()
        self.numbers = list(range(len(order)))

    def longest(self, at: int, free: int, room: float) -> int:
        """Return the index in ``numbers`` of the longest sequence within the slots and work left, or -1."""
        fits = min(bisect_right(self.slots[at], free), bisect_right(self.most[at], room))
        return bisect_right(self.numbers, fits - 1) - 1

    def put(self, n: int, group: _Group) -> None:
        """Add a sequence to a group."""
        group.members.append(self.order[n])
        group.load += self.load[group.at][n]
        group.free -= self.slots[group.at][n]

    def fill(self, group: _Group, level: float) -> None:
        """Fill a group up to a level, with the longest sequences first."""
        while (place := self.longest(group.at, group.free, level - group.load)) >= 0:
            if self.numbers[place] < self._shortest[group.at]:
                break
            self.put(self.numbers.pop(place), group)

    def spread(self, queues: Sequence[tuple[float, Sequence[_Group]]]) -> bool:
        """Put sequences, longest first, in the queue with room and least work; False if one fits nowhere."""
        # A queue is a rank's work so far and all its groups of degree 1. In ``_finish`` it is the load of one
        # group, minus its level, and this group. A full queue waits for a shorter sequence.
        free = [[group.free for group in groups] for _, groups in queues]
        heap = [(work, at) for at, (work, _) in enumerate(queues)]
        heapq.heapify(heap)
        waiting: list[tuple[int, float, int]] = []  # (-most free slots of a group, work, queue)
        placed: list[tuple[int, _Group]] = []
        for n in reversed(self.numbers):
            while waiting and -waiting[0][0] >= self.slots[0][n]:
                heapq.heappush(heap, heapq.heappop(waiting)[1:])
            while heap:
                work, at = heap[0]
                most, groups = max(free[at], default=0), queues[at][1]
                if groups and most >= self.slots[groups[0].at][n]:
                    break
                heapq.heappop(heap)
                heapq.heappush(waiting, (-most, work, at))
            else:
                return False
            place = free[at].index(most)
            group = groups[place]
            free[at][place] -= self.slots[group.at][n]
            placed.append((n, group))
            heapq.heapreplace(heap, (work + self.load[group.at][n], at))
        for n, group in placed:
            self.put(n, group)
        self.numbers = []
        return True


def _bins(tables: Tables, groups: list[_Group]) -> SharedBins:
    groups = sorted(groups, key=lambda group: (group.microbatch, group.first))
    sizes = [len(group.members) for group in groups]
    return SharedBins(
        order=np.array([i for group in groups for i in group.members]),
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        degree=np.array([tables.degrees[group.at] for group in groups]),
        first=np.array([group.first for group in groups]),
        microbatch=np.array([group.microbatch for group in groups]),
        load=np.array([group.load for group in groups]),
        num_microbatches=groups[-1].microbatch + 1,
    )


def _even_microbatches(tables: Tables, ranks: int) -> SharedBins:
    """Fill one microbatch after another, each with the longest sequences that are left."""
    # A rank reaches the level of a long sequence only with sequences that are about as long: shorter ones
    # have less work per slot, so its slots run out first.
    left, slots = _Left(tables), _FULL * ranks * tables.room[0]
    done: list[list[_Group]] = []
    while left.numbers:
        needed = sum(left.slots[0][n] for n in left.numbers) / slots  # number of microbatches
        mean = sum(left.work[n] for n in left.numbers) / ranks / math.ceil(needed)
        loads = [row[left.numbers[-1]] for row in left.most]
        if needed <= 1 and loads[0] <= mean:
            _finish(left, done, tables.room[0], ranks, added=int(needed > _FEW))
            break
        lowest = max(mean, min(loads))
        levels = {lowest, *(load for load in loads if lowest < load <= _WIDEST * lowest)}
        tried = [_microbatch(left, tables, ranks, level) for level in sorted(levels)]
        _, groups, left = max(tried, key=lambda each: each[0])
        done.append(groups)
    for microbatch, groups in enumerate(done):
        first = 0
        # The largest groups come first, so that each begins at a multiple of its size.
        for group in sorted(groups, key=lambda group: (-group.at, -group.load)):
            group.first, group.microbatch = first, microbatch
            first += tables.degrees[group.at]
    return _bins(tables, [group for groups in done for group in groups])


def _microbatch(left: _Left, tables: Tables, ranks: int, level: float) -> tuple[float, list[_Group], _Left]:
    """Fill a microbatch to a level; return its work per time, its groups, and the sequences left."""
    rest, groups, level = copy(left), list[_Group](), level * _ROUNDING
    rest.numbers = list(left.numbers)
    while ranks:
        place, at = -1, 0  # indices of the longest sequence that fits, and of the least degree that holds it
        for wider, degree in enumerate(tables.degrees):
            if degree > ranks or place == len(rest.numbers) - 1:
                break
            if (found := rest.longest(wider, tables.room[wider], level)) > place:
                place, at = found, wider
        group = _Group(at=at, free=tables.room[at])
        if place >= 0:
            rest.put(rest.numbers.pop(place), group)
            rest.fill(group, level)
        groups.append(group)
        ranks -= tables.degrees[at]
    work = sum(left.work[n] for n in left.numbers) - sum(rest.work[n] for n in rest.numbers)
    return work / max(group.load for group in groups), groups, rest


def _finish(left: _Left, done: list[list[_Group]], room: int, ranks: int, added: int) -> None:
    """Put the sequences left into groups below their level, and into ``added`` or more new microbatches."""
    work = sum(left.work[n] for n in left.numbers)
    levels = [max(group.load for group in groups) for groups in done]
    while True:
        new = [[_Group(at=0, free=room) for _ in range(ranks)] for _ in range(added)]
        known = zip([*done, *new], levels + [work / ranks / max(added, 1)] * added, strict=True)
        if left.spread([(group.load - level, [group]) for groups, level in known for group in groups]):
            done += new
            return
        added += 1


def _even_step(tables: Tables, ranks: int) -> SharedBins:
    """Give each sequence the fewest ranks on which its load is within an even share; then fill up groups."""
    # Each rank runs its largest groups first. So all ranks of a group have run the same larger groups before,
    # and no rank waits for another.
    even, left = tables.even_time(ranks), _Left(tables)
    load = np.where(tables.possible, tables.load, np.inf)
    within = load <= even
    fewest = np.where(within.any(axis=0), within.argmax(axis=0), load.argmin(axis=0))[left.order].tolist()
    groups: list[_Group] = []
    work, used = np.zeros(ranks), np.zeros(ranks, dtype=np.int64)  # work and microbatches of each rank so far
    for at in range(len(tables.degrees) - 1, 0, -1):
        shared = [n for n in left.numbers if fewest[n] == at]
        left.numbers = [n for n in left.numbers if fewest[n] != at]
        for group in _shared_groups(left, tables, at, shared[::-1], work, used):
            before = group.load
            left.fill(group, before + even - float(work[group.first]))
            work[group.first : group.first + tables.degrees[at]] += group.load - before
            groups.append(group)
    slots = sum(left.slots[0][n] for n in left.numbers)
    share = np.maximum(even - work, 1e-9 * even)  # the work each rank can take; its slots are in proportion
    needed = np.ceil(slots / (_FULL * tables.room[0]) * share / share.sum() - 1e-9)
    count = max(1, int((used + needed).max()))
    while True:
        queues = [
            [_Group(at=0, free=tables.room[0], first=rank, microbatch=j) for j in range(begun, count)]
            for rank, begun in enumerate(used.tolist())
        ]
        if left.spread(list(zip(work.tolist(), queues, strict=True))):
            return _bins(tables, groups + [group for queue in queues for group in queue])
        count += 1


def _shared_groups(
    left: _Left, tables: Tables, at: int, numbers: list[int], work: FloatArray, used: IntArray
) -> list[_Group]:
    """Put sequences into groups of a degree, on the ranks with least work; update ``work`` and ``used``."""
    size = tables.degrees[at]
    groups: dict[int, list[_Group]] = {first: [] for first in range(0, len(work), size)}
    heap = [(float(work[first]), first) for first in groups]
    heapq.heapify(heap)
    for n in numbers:
        done, first = heap[0]
        group = next((group for group in groups[first] if group.free >= left.slots[at][n]), None)
        if group is None:
            group = _Group(at=at, free=tables.room[at], first=first, microbatch=int(used[first]))
            groups[first].append(group)
            used[first : first + size] += 1
        left.put(n, group)
        heapq.heapreplace(heap, (done + left.load[at][n], first))
    for done, first in heap:
        work[first : first + size] = done
    return [group for several in groups.values() for group in several]
