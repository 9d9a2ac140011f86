"""Long sequences of a step, ranks -> microbatches, each with the work its ranks go up to, and groups in them.

Ranks that wait for each other in every microbatch lose what they do less than the one with most work. A long
sequence sets that level; the ranks beside it come near to it only with sequences that have as much work a
slot, which are the long ones. So each microbatch takes the longest that are left, as many as it holds.

Legend: S sequences, C degrees, R ranks, N long sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from lightning_thd.packing.sharing.tables import BoolArray, IntArray, Tables

_LEVELS = 2  # tried for each microbatch beside those at which its longest sequence takes all of the time
_WIDEST = 2.0  # the highest, times the lowest
_JOIN = 1.1  # work of a sequence in a group of others, of that in one of its own: above it opens one
_AHEAD = 256  # sequences that are looked at for one microbatch, or twice as many as there are ranks
_TOLERANCE = 1 + 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Filler:
    """What the short sequences of a step, which fill up its groups, are like.

    Attributes:
        work: of all of them, on one rank.
        density: their work for each slot, on one rank.
        slots: of the shortest, at every degree.
        load: of the shortest, at every degree.
        factor: work of a group with them, of that of one rank, at every degree.
    """

    work: float
    density: float
    slots: list[int]
    load: list[float]
    factor: list[float]

    @classmethod
    def of(cls, tables: Tables, short: BoolArray) -> Filler:
        """Describe the short sequences, or say of none that nothing fits."""
        count = len(tables.degrees)
        if not short.any():
            return cls(
                work=0.0, density=0.0, slots=[0] * count, load=[math.inf] * count, factor=[1.0] * count
            )
        load = tables.load[:, short]
        work = load.sum(axis=1) * np.array(tables.degrees)
        return cls(
            work=float(work[0]),
            density=float(work[0] / tables.slots[0, short].sum()),
            slots=tables.slots[:, short].min(axis=1).tolist(),
            load=load.min(axis=1).tolist(),
            factor=(work / work[0]).tolist(),
        )


@dataclass(kw_only=True, slots=True)
class Microbatch:
    """The groups of one microbatch that hold long sequences.

    Attributes:
        degree: index of each group's degree.
        load: work of a rank of it.
        free: slots left.
        members: its sequences.
        seats: ranks in no group.
        value: work of all of these sequences, each at its cheapest degree.
        late: sequences that found no place.
    """

    seats: int
    degree: list[int] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    members: list[list[int]] = field(default_factory=list)
    value: float = 0.0
    late: list[int] = field(default_factory=list)

    def open(self, at: int, ranks: int, slots: int) -> int:
        """Add a group; return its number."""
        self.seats -= ranks
        self.degree.append(at)
        self.load.append(0.0)
        self.free.append(slots)
        self.members.append([])
        return len(self.degree) - 1

    def put(self, n: int, group: int, slots: int, load: float, value: float) -> None:
        """Add a sequence to a group."""
        self.load[group] += load
        self.free[group] -= slots
        self.members[group].append(n)
        self.value += value

    @property
    def level(self) -> float:
        """Return the work of the heaviest group's ranks, which all ranks wait for."""
        return max(self.load)

    def filled(self, tables: Tables, filler: Filler) -> float:
        """Return the work of all sequences here, and of short ones that fit, of all there is time for."""
        level, density = self.level, filler.density
        ranks, found = self.seats, self.seats * min(level, tables.room[0] * density)
        for at, load, free in zip(self.degree, self.load, self.free, strict=True):
            degree = tables.degrees[at]
            ranks += degree
            if free >= filler.slots[at] and level - load >= filler.load[at]:
                found += min(free * density, (level - load) * degree / filler.factor[at])
        return (self.value + min(found, filler.work)) / (ranks * level)


class Long:
    """The long sequences of a step, numbered 0 to N - 1 from the longest on."""

    def __init__(self, tables: Tables, ranks: int, sequences: IntArray, filler: Filler) -> None:
        self.tables, self.ranks, self.filler = tables, ranks, filler
        self.sequences = sequences
        self._load = np.where(tables.possible, tables.load, np.inf)[:, sequences]
        spent = self._load * np.array(tables.degrees)[:, None]
        self.load, self.slots = self._load.tolist(), tables.slots[:, sequences].tolist()
        self.spent, self.value = spent.tolist(), spent.min(axis=0).tolist()

    def microbatches(self, even: float, lowest: float) -> tuple[list[Microbatch], list[int]]:
        """Put the long sequences into as many microbatches as it takes, the longest first.

        Args:
            even: an even share of the work of the step, of one microbatch.
            lowest: the lowest level that is tried, of that.

        Returns:
            The microbatches, and the sequences left for single ranks, which have slots and time for them.
        """
        alone = min(even, self.filler.density * self.tables.room[0])
        found: list[Microbatch] = []
        rest = list(range(len(self.sequences)))
        ahead = max(_AHEAD, 2 * self.ranks)
        while rest and self.load[0][rest[0]] > alone:
            near, far = rest[:ahead], rest[ahead:]
            levels = self._levels(rest[0], even, lowest * even)
            best = self._pack(near, max(levels, key=partial(self._used, near)), whole=True)
            found.append(best)
            rest = best.late + far
        return found, rest

    def _levels(self, longest: int, even: float, lowest: float) -> list[float]:
        """Return the levels to try: all at which the longest sequence fills its time, and some between."""
        own = [load for load in self._load[:, longest].tolist() if load < math.inf]
        low = max(min(own), lowest)
        high = max(low, min(_WIDEST * low, max(own[0], even)))
        between = np.geomspace(low, high, _LEVELS).tolist()
        return sorted({*between, *(load for load in own if load >= low)})

    def _used(self, sequences: list[int], level: float) -> float:
        return self._pack(sequences, level, whole=False).filled(self.tables, self.filler)

    def _pack(self, sequences: list[int], level: float, *, whole: bool) -> Microbatch:
        """Give each sequence to the first group with slots and time for it, or open one of the fewest ranks.

        A group of more ranks exchanges more: a sequence joins one only where its work grows little by it, or
        where no ranks are left for a group of its own. Without ``whole`` all of these wait, for a quick look.
        """
        degrees, most = self.tables.degrees, level * _TOLERANCE
        within = self._load[:, sequences] <= most
        fewest = np.where(within.any(axis=0), within.argmax(axis=0), -1).tolist()
        one = Microbatch(seats=self.ranks)
        open_ = [_Open(self.slots[0][sequences[-1]]) for _ in degrees]
        for place, (n, own) in enumerate(zip(sequences, fewest, strict=True)):
            fits = own >= 0 and one.seats >= degrees[own]
            spend = _JOIN * self.spent[own][n] if fits else math.inf
            for degree in range(own, len(degrees)) if own >= 0 else ():
                slots, load, groups = self.slots[degree][n], self.load[degree][n], open_[degree]
                if slots <= groups.free and load <= groups.room and self.spent[degree][n] <= spend:
                    at = groups.take(slots, load)
                    if at >= 0:
                        break
            else:
                if not fits:
                    if not one.seats and not (whole and any(groups.free for groups in open_)):
                        one.late += sequences[place:]
                        break
                    one.late.append(n)
                    continue
                at, degree = one.open(own, degrees[own], self.tables.room[own]), own
                slots, load = self.slots[own][n], self.load[own][n]
                open_[own].add(at, self.tables.room[own] - slots, most - load)
            one.put(n, at, slots, load, self.value[n])
        return one


class _Open:
    """Groups of one degree that may take more, each with its slots and the time it has left."""

    def __init__(self, least: int) -> None:
        self.least, self.groups = least, list[tuple[int, int, float]]()
        self.free, self.room = 0, 0.0  # at least the most of any

    def add(self, number: int, free: int, room: float) -> None:
        """Add a group, if it holds another sequence."""
        if free >= self.least:
            self.groups.append((number, free, room))
            self.free, self.room = max(self.free, free), max(self.room, room)

    def take(self, slots: int, load: float) -> int:
        """Take so many slots and so much time of the first group that has both; -1 where none has."""
        for place, (number, free, room) in enumerate(self.groups):
            if free >= slots and room >= load:
                del self.groups[place]
                self.add(number, free - slots, room - load)
                return number
        rows = self.groups or [(-1, 0, 0.0)]
        self.free, self.room = max([row[1] for row in rows]), max([row[2] for row in rows])
        return -1
