"""Slots and work of sequences, ranks, microbatches -> groups: long sequences shared, short ones filled in.

Legend: S sequences, R ranks, M microbatches, a seat is one rank in one microbatch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from lightning_thd.packing.sharing.tables import BoolArray, FloatArray, IntArray, Tables

_RECENT = 8  # groups that are tried before another is opened


class Seats:
    """Groups of ranks that are being filled with the sequences of a step.

    Attributes:
        degree: index of each group's degree.
        load: work of a rank of it.
        free: slots left.
        microbatch: when it runs.
        home: the group of every sequence, -1 before it has one.
    """

    def __init__(self, tables: Tables, ranks: int, count: int) -> None:
        self.tables, self.ranks, self.count = tables, ranks, count
        self.degree: list[int] = []
        self.load: list[float] = []
        self.free: list[int] = []
        self.microbatch: list[int] = []
        self.home = [-1] * tables.load.shape[1]

    def share_long(self, long: IntArray, even: float, slack: float, worth: BoolArray) -> None:
        """Open groups for long sequences, microbatch after microbatch, the heaviest first.

        A microbatch takes as long as its heaviest sequence on as many ranks as are worth it. Beside it
        the next get as few ranks as do in that time: their work is what other ranks would wait with.

        Args:
            long: sequences that may need several ranks, or a rank alone, the heaviest first.
            even: an even share of the work of a microbatch.
            slack: how far above it a sequence may be before more ranks share it.
            worth: bool ``[C, S]``, degrees that sequences may get.
        """
        load = np.where(worth, self.tables.load, np.inf)[:, long]
        lightest = load.min(axis=0)
        rest = np.arange(len(long))
        for microbatch in range(self.count):
            if not len(rest):
                break
            level = max(even * slack, float(lightest[rest[0]]))
            fits = load[:, rest] <= level
            chosen = np.where(fits.any(axis=0), fits.argmax(axis=0), load[:, rest].argmin(axis=0))
            late = self._open(microbatch, long[rest].tolist(), chosen, level)
            rest = rest[late]

    def _open(self, microbatch: int, sequences: list[int], chosen: IntArray, level: float) -> list[int]:
        """Open groups for sequences that fit one microbatch; return the positions of those that do not."""
        degrees, room, seats, late = self.tables.degrees, self.tables.room, self.ranks, []
        slots = self.tables.slots[chosen, sequences].tolist()
        loads = self.tables.load[chosen, sequences].tolist()
        recent: list[int] = []
        for place, degree in enumerate(chosen.tolist()):
            more, taken = loads[place], slots[place]
            for at in recent:
                if self.degree[at] == degree and self.free[at] >= taken and self.load[at] + more <= level:
                    break
            else:
                if seats < degrees[degree]:
                    late.append(place)
                    continue
                seats -= degrees[degree]
                at = self._add(degree, room[degree], microbatch)
                recent = [at, *recent[: _RECENT - 1]]
            self.home[sequences[place]] = at
            self.free[at] -= taken
            self.load[at] += more
        return late

    def _add(self, degree: int, room: int, microbatch: int) -> int:
        self.degree.append(degree)
        self.load.append(0.0)
        self.free.append(room)
        self.microbatch.append(microbatch)
        return len(self.degree) - 1

    def add_singles(self) -> None:
        """Make every free seat (rank and microbatch) a group of one rank."""
        taken = np.bincount(
            self.microbatch, np.array(self.tables.degrees)[self.degree], minlength=self.count
        ).astype(np.int64)
        left = (self.ranks - taken).tolist()
        singles = sum(left)
        self.degree += [0] * singles
        self.load += [0.0] * singles
        self.free += [self.tables.room[0]] * singles
        self.microbatch += np.repeat(np.arange(self.count), left).tolist()

    def rooms(self, work: float) -> FloatArray:
        """Return how much of the remaining work each group takes to even out its microbatch, then all.

        A microbatch waits for its heaviest group anyway, so the others are filled up to that; what is left
        over is spread evenly, as water finds its level.
        """
        load, when = np.array(self.load), np.array(self.microbatch)
        peaks = np.zeros(self.count)
        np.maximum.at(peaks, when, load)
        total = float((load * np.array(self.tables.degrees)[self.degree]).sum()) + work
        falling = np.sort(peaks)[::-1]
        even = total / (self.ranks * self.count)
        for heavy in range(self.count):  # the heaviest stay as they are, the others share the rest
            even = (total - self.ranks * float(falling[:heavy].sum())) / (self.ranks * (self.count - heavy))
            if falling[heavy] <= even:
                break
        room: FloatArray = np.maximum(peaks, even)[when] - load
        return room

    def fill(self, short: IntArray, room: Sequence[float], worth: BoolArray) -> bool:
        """Put each sequence, longest first, where slots and room for work are; False where one fits no group.

        A group without the slots for one sequence waits until the sequences, which get shorter, fit it again.
        One whose exchange is not worth it for a sequence is not for shorter ones either.
        """
        heap = [(-most, at) for at, most in enumerate(room)]
        heapq.heapify(heap)
        waiting: list[tuple[int, float, int]] = []  # (-slots left, -room, group)
        slots, load = self.tables.slots[:, short].tolist(), self.tables.load[:, short].tolist()
        least, worthy = self.tables.least[short].tolist(), worth[:, short].tolist()
        degree, free, taken_load = self.degree, self.free, self.load
        for n, i in enumerate(short.tolist()):
            while waiting and -waiting[0][0] >= slots[degree[waiting[0][2]]][n]:
                _, below, at = heapq.heappop(waiting)
                heapq.heappush(heap, (below, at))
            other = []
            while heap:
                below, at = heap[0]
                of = degree[at]
                if of < least[n]:
                    other.append(heapq.heappop(heap))
                elif free[at] < slots[of][n]:
                    heapq.heappop(heap)
                    heapq.heappush(waiting, (-free[at], below, at))
                elif not worthy[of][n]:
                    heapq.heappop(heap)
                else:
                    break
            else:
                return False
            more = load[of][n]
            self.home[i] = at
            free[at] -= slots[of][n]
            taken_load[at] += more
            heapq.heapreplace(heap, (below + more, at))
            for entry in other:
                heapq.heappush(heap, entry)
        return True
