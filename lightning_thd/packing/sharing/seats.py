"""Groups of ranks in microbatches, short sequences -> groups filled up to the level of each microbatch.

Legend: S sequences, R ranks, M microbatches, a seat is one rank in one microbatch.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np

from lightning_thd.packing.sharing.levels import Microbatch
from lightning_thd.packing.sharing.tables import IntArray, Tables


class Seats:
    """Groups of ranks that are being filled with the sequences of a step.

    Attributes:
        degree: index of each group's degree.
        load: work of a rank of it.
        free: slots left.
        microbatch: when it runs.
        level: work that its ranks have time for.
        home: the group of every sequence, -1 before it has one.
        count: M.
    """

    def __init__(self, tables: Tables, ranks: int) -> None:
        self.tables, self.ranks, self.count = tables, ranks, 0
        self.degree: list[int] = []
        self.load: list[float] = []
        self.free: list[int] = []
        self.microbatch: list[int] = []
        self.level: list[float] = []
        self.home = [-1] * tables.load.shape[1]

    def copy(self) -> Seats:
        """Return groups that can be filled without these changing."""
        other = Seats(self.tables, self.ranks)
        for name in ("degree", "load", "free", "microbatch", "level", "home"):
            setattr(other, name, list(getattr(self, name)))
        other.count = self.count
        return other

    def open(self, one: Microbatch, numbers: Sequence[int]) -> None:
        """Add a microbatch with the groups of its long sequences, and single ranks beside them."""
        for at, members in enumerate(one.members, len(self.degree)):
            for n in members:
                self.home[numbers[n]] = at
        self.count += 1
        self._add(one.degree, one.load, one.free, one.level)
        self._add_singles(one.seats, one.level)

    def add_microbatch(self, level: float) -> None:
        """Add a microbatch of single ranks."""
        self.count += 1
        self._add_singles(self.ranks, level)

    def _add_singles(self, ranks: int, level: float) -> None:
        self._add([0] * ranks, [0.0] * ranks, [self.tables.room[0]] * ranks, level)

    def _add(self, degree: list[int], load: list[float], free: list[int], level: float) -> None:
        self.degree += degree
        self.load += load
        self.free += free
        self.microbatch += [self.count - 1] * len(degree)
        self.level += [level] * len(degree)

    def complete(self, groups: Iterable[int], short: Short) -> None:
        """Fill each group to its level: the longest sequence that fits, then the longest that still does."""
        for at in groups:
            degree, room, free = self.degree[at], self.level[at] - self.load[at], self.free[at]
            while (n := short.longest(degree, free, room)) >= 0:
                self.home[short.sequences[n]] = at
                room -= short.load[degree][n]
                free -= short.slots[degree][n]
            self.load[at], self.free[at] = self.level[at] - room, free

    def fill(self, short: Sequence[int], first: int) -> bool:
        """Put each sequence, longest first, where there is most time for it; False where one fits no group.

        Groups before the first are left as they are.

        A group without the slots for one sequence waits until the sequences, which get shorter, fit it again.
        """
        heap = [(self.load[at] - self.level[at], at) for at in range(first, len(self.load))]
        heapq.heapify(heap)
        waiting: list[tuple[int, float, int]] = []  # (-slots left, -room, group)
        slots, load = self.tables.slots[:, short].tolist(), self.tables.load[:, short].tolist()
        for n, i in enumerate(short):
            while waiting and -waiting[0][0] >= slots[self.degree[waiting[0][2]]][n]:
                _, below, at = heapq.heappop(waiting)
                heapq.heappush(heap, (below, at))
            while heap:
                below, at = heap[0]
                degree = self.degree[at]
                if self.free[at] >= slots[degree][n]:
                    break
                heapq.heappop(heap)
                heapq.heappush(waiting, (-self.free[at], below, at))
            else:
                return False
            more = load[degree][n]
            self.home[i] = at
            self.free[at] -= slots[degree][n]
            self.load[at] += more
            heapq.heapreplace(heap, (below + more, at))
        return True

    def slowest(self) -> float:
        """Return the time of the step: of its microbatches' heaviest groups, in all."""
        heaviest = np.zeros(self.count)
        np.maximum.at(heaviest, self.microbatch, self.load)
        return float(heaviest.sum())


class Short:
    """Sequences that fit one rank, of which groups take the longest that they have slots and time for.

    Attributes:
        sequences: the shortest first.
        slots: of each, at every degree.
        load: of each, at every degree.
        work: of those that are left, on one rank.
        left_slots: theirs.
    """

    def __init__(self, tables: Tables, sequences: IntArray) -> None:
        order = sequences[np.argsort(tables.slots[0, sequences], kind="stable")]
        self.sequences: list[int] = order.tolist()
        slots, load = tables.slots[:, order], tables.load[:, order]
        self.slots, self.load = slots.tolist(), load.tolist()
        self._most = np.maximum.accumulate(load, axis=1).tolist()  # rises even where a cost does not
        self._left = list(range(len(order)))
        self.work, self.left_slots = float(load[0].sum()), int(slots[0].sum())

    def longest(self, degree: int, free: int, room: float) -> int:
        """Take the longest sequence for so many slots and so much time; return its number, or -1."""
        fits = min(bisect_right(self.slots[degree], free), bisect_right(self._most[degree], room))
        k = bisect_right(self._left, fits - 1) - 1
        if k < 0:
            return -1
        n = self._left.pop(k)
        self.work -= self.load[0][n]
        self.left_slots -= self.slots[0][n]
        return n

    def heaviest(self) -> float:
        """Return the work of the longest that is left, on one rank."""
        return float(self._most[0][self._left[-1]])

    def left(self) -> list[int]:
        """Return the sequences that no group took, the longest first."""
        return [self.sequences[n] for n in reversed(self._left)]
