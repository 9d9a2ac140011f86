"""Slots and work of sequences, ranks -> groups nested in each other, whose ranks wait only for a step's end.

Where nothing but a shared sequence makes ranks wait for each other before a step ends, as in DDP, no single
microbatch needs to be even; what each rank runs in all must be. Each rank runs its largest groups first, and
groups of c ranks begin at multiples of c. So all ranks of a group come from the same larger groups, at the
same time.

Legend: S sequences, R ranks, M microbatches of each.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from lightning_thd.packing.sharing.tables import BoolArray, FloatArray, IntArray, Tables

_FULL = 0.95  # of the slots of single ranks: what is left lets work be spread evenly


class Nest:
    """Groups of ranks that are being filled, from the largest degree to single ranks.

    Attributes:
        home: the group of every sequence, -1 before it has one.
        degree: index of each group's degree.
        first: first rank of each group.
        microbatch: when it runs.
        load: work of a rank of it.
        work: of each rank, in all.
        count: M.
    """

    def __init__(self, tables: Tables, ranks: int) -> None:
        self.tables, self.ranks, self.count = tables, ranks, 0
        self.home = [-1] * tables.load.shape[1]
        self.degree: list[int] = []
        self.first: list[int] = []
        self.microbatch: list[int] = []
        self.load: list[float] = []
        self.work = [0.0] * (ranks // tables.degrees[-1])  # of each set of as many ranks as have a group
        self.used = [0] * len(self.work)  # microbatches of each

    def share(self, chosen: IntArray, even: float, worth: BoolArray) -> IntArray:
        """Put sequences of several ranks into groups, on the ranks that have least to do.

        Slots that they leave go to sequences of fewer ranks for which the exchange is worth it, as long as no
        rank gets more than an even share.

        Args:
            chosen: int64 ``[S]``, index of each sequence's degree.
            even: an even share of the work of the step.
            worth: bool ``[C, S]``, degrees that sequences may get to fill up a group.

        Returns:
            int64, the sequences that are left for single ranks, longest first.
        """
        waiting = np.argsort(-self.tables.slots[0], kind="stable")
        for at in range(len(self.tables.degrees) - 1, 0, -1):
            own = chosen[waiting] == at
            groups = self._open_groups(at, waiting[own])
            waiting = waiting[~own]
            if groups:
                self._fill_up(groups, at, waiting[worth[at, waiting]][::-1], even)
                waiting = waiting[[self.home[i] < 0 for i in waiting.tolist()]]
            self.work = [each for each in self.work for _ in range(2)]
            self.used = [each for each in self.used for _ in range(2)]
        return waiting

    def _rows(self, at: int, sequences: IntArray) -> Iterator[tuple[int, int, float]]:
        slots, load = self.tables.slots[at, sequences], self.tables.load[at, sequences]
        return zip(sequences.tolist(), slots.tolist(), load.tolist(), strict=True)

    def _add(self, at: int, node: int) -> int:
        self.degree.append(at)
        self.first.append(node * self.tables.degrees[at])
        self.microbatch.append(self.used[node])
        self.load.append(0.0)
        self.used[node] += 1
        return len(self.degree) - 1

    def _open_groups(self, at: int, own: IntArray) -> dict[int, tuple[int, int]]:
        """Give each sequence to the ranks with least work; return each new group's node and slots left."""
        heap = [(done, node) for node, done in enumerate(self.work)]
        heapq.heapify(heap)
        of_node: dict[int, list[int]] = {}
        free: dict[int, tuple[int, int]] = {}
        for i, slots, load in self._rows(at, own):
            done, node = heap[0]
            groups = of_node.setdefault(node, [])
            group = next((g for g in groups if free[g][1] >= slots), -1)
            if group < 0:
                group = self._add(at, node)
                groups.append(group)
                free[group] = node, self.tables.room[at]
            free[group] = node, free[group][1] - slots
            self._put(i, group, node, load)
            heapq.heapreplace(heap, (done + load, node))
        return free

    def _put(self, i: int, group: int, node: int, load: float) -> None:
        self.home[i] = group
        self.load[group] += load
        self.work[node] += load

    def _fill_up(
        self, groups: dict[int, tuple[int, int]], at: int, candidates: IntArray, even: float
    ) -> None:
        """Give what groups have left, in slots and up to an even share, to the longest of the candidates.

        Args:
            groups: node and slots left of each group.
            at: index of their degree.
            candidates: sequences, shortest first.
            even: an even share of the work of the step.
        """
        rows = list(self._rows(at, candidates))
        slots, loads = [row[1] for row in rows], [row[2] for row in rows]  # both rise with the length
        for group, (node, left) in groups.items():
            while True:
                k = min(bisect_right(slots, left), bisect_right(loads, even - self.work[node])) - 1
                if k < 0:
                    break
                left -= slots.pop(k)
                self._put(rows.pop(k)[0], group, node, loads.pop(k))

    def fill(self, short: IntArray) -> None:
        """Put the remaining sequences on single ranks, longest first, in the fewest microbatches that do."""
        count = self._fewest(short)
        while not self._fill_in(short, count):
            count += 1
        self.count = count

    def _fewest(self, short: IntArray) -> int:
        """Return how many microbatches hold these sequences if they make the work of all ranks even."""
        used = np.array(self.used)
        if not len(short):
            return int(used.max())
        added = _filled_up(np.array(self.work), float(self.tables.load[0, short].sum()))
        slots = added * (self.tables.slots[0, short].sum() / added.sum())
        packs = np.ceil(slots / (_FULL * self.tables.room[0]) - 1e-9).astype(np.int64)
        return max(1, int((used + packs).max()))

    def _fill_in(self, short: IntArray, count: int) -> bool:
        """Fill single ranks in given microbatches; False, with nothing changed, where a sequence finds none.

        Ranks without the slots for one sequence wait until the sequences, which get shorter, fit them again.
        """
        room = self.tables.room[0]
        free = [[room] * (count - used) for used in self.used]
        heap = [(done, rank) for rank, done in enumerate(self.work)]
        heapq.heapify(heap)
        waiting: list[tuple[int, float, int]] = []  # (-most slots left in a microbatch, work, rank)
        seats: list[tuple[int, int, int, float]] = []
        for i, slots, load in self._rows(0, short):
            while waiting and -waiting[0][0] >= slots:
                heapq.heappush(heap, heapq.heappop(waiting)[1:])
            while heap:
                done, rank = heap[0]
                left = free[rank]
                most = max(left, default=0)
                if most >= slots:
                    break
                heapq.heappop(heap)
                heapq.heappush(waiting, (-most, done, rank))
            else:
                return False
            place = left.index(most)
            left[place] = most - slots
            seats.append((i, rank, place, load))
            heapq.heapreplace(heap, (done + load, rank))
        groups = [[self._add(0, rank) for _ in left] for rank, left in enumerate(free)]
        for i, rank, place, load in seats:
            self._put(i, groups[rank][place], rank, load)
        return True


def _filled_up(work: FloatArray, more: float) -> FloatArray:
    """Return what each rank gets of more work if that goes to those with least, as water finds its level."""
    rising = np.sort(work)
    below = np.arange(1, len(work) + 1) * rising - np.cumsum(rising)  # to raise all before up to each
    filled = int(np.searchsorted(below, more, side="right"))
    level = (more + float(rising[:filled].sum())) / filled
    added: FloatArray = np.maximum(level - work, 0.0)
    return added
