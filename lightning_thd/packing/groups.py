"""The sequences of a step -> microbatches of groups of ranks: short ones whole on a rank, long ones shared.

Every microbatch tiles all ranks with groups of 1, 2, 4, ... neighbours. A group runs one pack, each rank its
share of it. So each sequence gets the degree that it needs, for its memory and for an even step, and all
ranks run the same number of microbatches. There are two planners, because ranks wait at different times:

- ``_even_plan``: ranks wait for each other in every microbatch (FSDP), so each microbatch is made even. In
  HSDP only the ranks that share weights do; large steps are then planned for each such set of ranks.
- ``_nested_plan``: ranks wait only at the end of the step (DDP), so only the sum over the microbatches of
  each rank is made even. On 512 ranks with long sequences this saves up to 15 % of a step against an even
  plan, and next to nothing on chats (python -m benchmarks.dynamic_cp).

Legend: S sequences, C degrees, R ranks, M microbatches of each rank. A *single* is one rank in one microbatch
that is in no group of several ranks. The *level* of a microbatch is the work to which its ranks are filled.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from lightning_thd._checks import host_ints, instance, whole_number
from lightning_thd.packing.degrees import BoolArray, FloatArray, IntArray, Sharing, Tables, check_tiling

# Sequences fill this share of all slots at most; the rest lets work be spread evenly.
_FULL, _FULL_SINGLES = 0.96, 0.95
_LONG = 0.7  # A sequence with more than this share of a microbatch's even work counts as long.
_LAST = 0.5  # The last microbatch gets this share less work: its short sequences come out even anyway.
_FEW = 0.1  # The last sequences get no microbatch of their own if they need less than this share of one.
# Lowest levels that are tried, in units of a microbatch's even work, and the tries for steps of so many
# sequences. Measured on benchmarks.dynamic_cp and random steps: five tries gain 3 % at two sequences a rank.
_LOWEST = (0.95, 0.6, 0.8, 1.25, 0.7)
_TRIES = {512: 5, 2048: 3}
_EVEN_ENOUGH = 1.01  # A plan within 1 % of the least time that any plan needs is not improved.
_SETS = 16  # More sets of ranks that wait within are planned in pairs, which takes less time.
_IDLE = 0.005  # Sets are planned one by one only if all ranks together would idle for this share of the work.
_WORTH = 1.05  # A sequence fills up a group of DDP only if it costs at most 1.05 times its cheapest degree.
_LEVELS = 2  # Levels tried for a microbatch, beside those at which its longest sequence takes all the time.
_WIDEST = 2.0  # The highest level that is tried, in units of the lowest.
_JOIN = 1.1  # A sequence joins a larger group only if it costs at most 1.1 times a group of its own.
_AHEAD = (
    256  # Sequences that are considered for one microbatch, or twice the number of ranks if that is more.
)
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SharedBins:
    """The sequences of each group of ranks, and which ranks and microbatch the group is."""

    order: IntArray  # int64 ``[S]``, positions of the sequences, group after group
    offsets: IntArray  # int64 ``[G + 1]``, of each group in ``order``
    degree: IntArray  # int64 ``[G]``, ranks of each group
    first: IntArray  # int64 ``[G]``, first rank of each group
    microbatch: IntArray  # int64 ``[G]``, when it runs
    load: FloatArray  # float64 ``[G]``, work of each rank of the group, its exchange included
    num_microbatches: int  # on every rank

    def time(self, ranks: int, together: int) -> float:
        """Return the time of the step, in work, if so many neighbours wait for each other in a microbatch."""
        slowest = np.zeros((ranks // together, self.num_microbatches))
        np.maximum.at(slowest, (self.first // together, self.microbatch), self.load)
        return float(slowest.sum(axis=1).max())


def share_out(
    lengths: npt.ArrayLike,
    capacity: int,
    *,
    ranks: int,
    sharing: Sharing,
    cost: Callable[[IntArray], FloatArray],
) -> SharedBins:
    """Assign a degree, a microbatch and ranks to every sequence, all planned together."""
    whole_number(capacity, "capacity", least=1, advice="It is the most slots of one rank.")
    instance(sharing, "sharing", Sharing, advice="Pass Sharing(max_degree=...).")
    check_tiling(ranks, sharing.max_degree)
    values = host_ints(lengths, "lengths", least=1, advice="Leave empty sequences out.")
    if not values.size:
        raise ValueError("lengths is empty: there is no sequence to share out. Pass the tokens of each.")
    tables, together = Tables.of(values, capacity, sharing, cost), sharing.waiting(ranks)
    if sharing.waits == "step":
        return _nested_plan(tables, ranks)
    tries = next((count for most, count in _TRIES.items() if len(values) <= most), 1)
    plans: list[SharedBins] = []
    if together < ranks and (tries > 1 or tables.idle(ranks).max() > _IDLE * tables.cheapest.sum()):
        plans.append(_side_by_side(tables, ranks, together, tries))
    if tries > 1 or not plans:
        plans.append(_even_plan(tables, ranks, tries))
    return min(plans, key=lambda plan: plan.time(ranks, together))


def _bins(
    tables: Tables, groups: _Groups | _Nest, laid: IntArray, first: IntArray, microbatch: IntArray
) -> SharedBins:
    """Lay groups out in the order ``laid``, in which their first ranks and microbatches are given."""
    group = np.argsort(laid)[np.array(groups.group_of)]
    return SharedBins(
        order=np.argsort(group, kind="stable"),
        offsets=np.concatenate([[0], np.cumsum(np.bincount(group, minlength=len(laid)))]),
        degree=np.array(tables.degrees)[np.array(groups.degree)[laid]],
        first=first,
        microbatch=microbatch,
        load=np.array(groups.load)[laid],
        num_microbatches=groups.count,
    )


# --- ranks that wait in every microbatch --------------------------------------------------------------------
# A long sequence sets the level of its microbatch. The ranks beside it come near that level only with
# sequences that have as much work a slot, which are the long ones. So each microbatch takes as many of the
# longest sequences that are left as it holds; short ones then fill every group up to the level.


def _side_by_side(tables: Tables, ranks: int, together: int, tries: int) -> SharedBins:
    """Give sets of ranks that wait for each other even work, and make the microbatches of each set even."""
    while ranks // together > _SETS and ranks // together % 2 == 0:
        together *= 2
    heap = [(0.0, at) for at in range(ranks // together)]
    work = tables.cheapest + tables.idle(together, len(heap))
    owner = np.empty(len(work), dtype=np.int64)
    for i in np.argsort(-work, kind="stable").tolist():
        done, at = heap[0]
        owner[i] = at
        heapq.heapreplace(heap, (done + float(work[i]), at))
    sets = [np.flatnonzero(owner == at) for at in range(len(heap))]
    plans = [_even_plan(tables.take(own), together, tries) if len(own) else None for own in sets]
    count = max(plan.num_microbatches for plan in plans if plan is not None)
    order: list[IntArray] = []
    sizes: list[IntArray] = []
    rows: list[tuple[IntArray, IntArray, IntArray, FloatArray]] = []
    for at, (own, plan) in enumerate(zip(sets, plans, strict=True)):
        ends = 0 if plan is None else plan.num_microbatches
        if plan is not None:
            order.append(own[plan.order])
            sizes.append(np.diff(plan.offsets))
            rows.append((plan.degree, plan.first + at * together, plan.microbatch, plan.load))
        idle = np.arange((count - ends) * together)  # empty microbatches of a set that is done early
        sizes.append(np.zeros_like(idle))
        first, microbatch = at * together + idle % together, ends + idle // together
        rows.append((np.ones_like(idle), first, microbatch, np.zeros(len(idle))))
    degree, first, microbatch, load = (np.concatenate(column) for column in zip(*rows, strict=True))
    return SharedBins(
        order=np.concatenate(order),
        offsets=np.concatenate([[0], np.cumsum(np.concatenate(sizes))]),
        degree=degree,
        first=first,
        microbatch=microbatch,
        load=load,
        num_microbatches=count,
    )


def _even_plan(tables: Tables, ranks: int, tries: int) -> SharedBins:
    """Make each microbatch even, and take the fastest of a few plans of different lowest levels."""
    fewest = max(1, math.ceil(int(tables.slots[0].sum()) / (_FULL * ranks * tables.room[0])))
    even = tables.even_time(ranks) / fewest
    short = (tables.least == 0) & (tables.load[0] <= _LONG * even)
    numbers = np.flatnonzero(~short)
    numbers = numbers[np.argsort(-tables.slots[0, numbers], kind="stable")]
    long = _Long(tables, ranks, numbers, _Filler.of(tables, short))
    enough = _EVEN_ENOUGH * tables.least_time(ranks)
    best: _Groups | None = None
    for lowest in _LOWEST[:tries]:
        groups = _fill_microbatches(long, np.flatnonzero(short), even, lowest)
        if best is None or groups.time() < best.time():
            best = groups
        if best.time() <= enough:
            break
    assert best is not None
    # Largest groups first: then each begins at a multiple of its size.
    load, index = np.array(best.load), np.array(best.degree)
    laid = np.lexsort((-load, -index, np.array(best.microbatch)))
    degree = np.array(tables.degrees)[index[laid]]
    begin = np.cumsum(degree) - degree
    return _bins(tables, best, laid, begin % ranks, begin // ranks)


def _fill_microbatches(long: _Long, short: IntArray, even: float, lowest: float) -> _Groups:
    """Fill microbatches with the long sequences, then with the short ones until none is left."""
    tables, ranks = long.tables, long.ranks
    slots = ranks * tables.room[0]
    found, single = long.microbatches(even, lowest)
    groups = _Groups(tables, ranks)
    numbers = long.sequences.tolist()
    for one in found:
        groups.open(one, numbers)
    rest = _Short(tables, np.concatenate([short, long.sequences[single]]))
    groups.complete(np.lexsort((groups.load, groups.degree, groups.microbatch)).tolist(), rest)
    while rest.left_slots > _FULL * slots:
        left = math.ceil(rest.left_slots / (_FULL * slots))
        full = rest.work / rest.left_slots * _FULL * tables.room[0]
        at = len(groups.degree)
        groups.add_microbatch(max(min(rest.work / ranks / (left - _LAST), full), rest.heaviest()))
        groups.complete(range(at, len(groups.degree)), rest)
    return _last(groups, rest, slots) if rest.left_slots else groups


def _last(groups: _Groups, rest: _Short, slots: int) -> _Groups:
    """Put the shortest sequences into a last microbatch, or on top of the others if that is faster."""
    left, best = rest.left(), None
    count = 0 if groups.count and rest.left_slots <= _FEW * slots else 1
    while True:
        for first in (len(groups.load), 0) if count else (0,):  # only the added ranks first, then any
            tried = groups.copy()
            for _ in range(count):
                tried.add_microbatch(rest.work / groups.ranks / count)
            if tried.fill(left, first):
                best = tried if best is None or tried.time() < best.time() else best
                break
        if count and best is not None:
            return best
        count += 1


@dataclass(frozen=True, kw_only=True, slots=True)
class _Filler:
    """A summary of the short sequences of a step, which fill up its groups."""

    work: float  # their sum, on one rank
    density: float  # their work for each slot, on one rank
    slots: list[int]  # those of the shortest, at every degree
    load: list[float]  # that of the shortest, at every degree
    factor: list[float]  # their work at every degree, in units of that on one rank

    @classmethod
    def of(cls, tables: Tables, short: BoolArray) -> _Filler:
        """Describe the short sequences; if there are none, return loads that no group has time for."""
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
class _Microbatch:
    """The groups of one microbatch that hold long sequences."""

    singles: int  # ranks in no group
    degree: list[int] = field(default_factory=list)  # index of each group's degree
    load: list[float] = field(default_factory=list)  # work of each of its ranks
    free: list[int] = field(default_factory=list)  # slots left
    members: list[list[int]] = field(default_factory=list)  # its sequences
    value: float = 0.0  # work of all of these sequences, each at its cheapest degree
    late: list[int] = field(default_factory=list)  # sequences that found no place

    def open(self, at: int, ranks: int, slots: int) -> int:
        """Add a group; return its number."""
        self.singles -= ranks
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

    def used(self, tables: Tables, filler: _Filler) -> float:
        """Return the share of all ranks' time that these sequences, and short ones that fit, will use."""
        level, density = self.level, filler.density
        ranks, found = self.singles, self.singles * min(level, tables.room[0] * density)
        for at, load, free in zip(self.degree, self.load, self.free, strict=True):
            degree = tables.degrees[at]
            ranks += degree
            if free >= filler.slots[at] and level - load >= filler.load[at]:
                found += min(free * density, (level - load) * degree / filler.factor[at])
        return (self.value + min(found, filler.work)) / (ranks * level)


class _Long:
    """The long sequences of a step, numbered from 0, the longest first."""

    def __init__(self, tables: Tables, ranks: int, sequences: IntArray, filler: _Filler) -> None:
        self.tables, self.ranks, self.filler = tables, ranks, filler
        self.sequences = sequences
        self._load = np.where(tables.possible, tables.load, np.inf)[:, sequences]
        total = self._load * np.array(tables.degrees)[:, None]
        self.load, self.slots = self._load.tolist(), tables.slots[:, sequences].tolist()
        self.total, self.value = total.tolist(), total.min(axis=0).tolist()

    def microbatches(self, even: float, lowest: float) -> tuple[list[_Microbatch], list[int]]:
        """Put the long sequences into as many microbatches as it takes, the longest first."""
        of_single = min(even, self.filler.density * self.tables.room[0])
        found: list[_Microbatch] = []
        rest = list(range(len(self.sequences)))
        ahead = max(_AHEAD, 2 * self.ranks)
        while rest and self.load[0][rest[0]] > of_single:
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
        return self._pack(sequences, level, whole=False).used(self.tables, self.filler)

    def _pack(self, sequences: list[int], level: float, *, whole: bool) -> _Microbatch:
        """Give each sequence to the first group with slots and time for it, or open one of the fewest ranks.

        A group of more ranks exchanges more. So a sequence joins one only if its work grows little, or if no
        ranks are left for a group of its own. Without ``whole`` packing ends when all ranks are in groups,
        which is enough to compare levels.
        """
        degrees, most = self.tables.degrees, level * _ROUNDING
        within = self._load[:, sequences] <= most
        fewest = np.where(within.any(axis=0), within.argmax(axis=0), -1).tolist()
        one = _Microbatch(singles=self.ranks)
        open_ = [_Open(self.slots[0][sequences[-1]]) for _ in degrees]
        for place, (n, own) in enumerate(zip(sequences, fewest, strict=True)):
            fits = own >= 0 and one.singles >= degrees[own]
            bound = _JOIN * self.total[own][n] if fits else math.inf
            for degree in range(own, len(degrees)) if own >= 0 else ():
                slots, load, groups = self.slots[degree][n], self.load[degree][n], open_[degree]
                if slots <= groups.free and load <= groups.room and self.total[degree][n] <= bound:
                    at = groups.take(slots, load)
                    if at >= 0:
                        break
            else:
                if not fits:
                    if not one.singles and not (whole and any(groups.free for groups in open_)):
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
    """Groups of one degree that may take more, each with the slots and the time it has left."""

    def __init__(self, least: int) -> None:
        self.least, self.groups = least, list[tuple[int, int, float]]()
        self.free, self.room = 0, 0.0  # upper bounds on those of any group

    def add(self, number: int, free: int, room: float) -> None:
        """Add a group, if it holds another sequence."""
        if free >= self.least:
            self.groups.append((number, free, room))
            self.free, self.room = max(self.free, free), max(self.room, room)

    def take(self, slots: int, load: float) -> int:
        """Take slots and time of the first group that has both; return its number, or -1."""
        for place, (number, free, room) in enumerate(self.groups):
            if free >= slots and room >= load:
                del self.groups[place]
                self.add(number, free - slots, room - load)
                return number
        rows = self.groups or [(-1, 0, 0.0)]
        self.free, self.room = max([row[1] for row in rows]), max([row[2] for row in rows])
        return -1


class _Groups:
    """All groups of a step's microbatches while they are being filled."""

    def __init__(self, tables: Tables, ranks: int) -> None:
        self.tables, self.ranks, self.count = tables, ranks, 0  # M
        self.degree: list[int] = []  # index of each group's degree
        self.load: list[float] = []  # work of each of its ranks
        self.free: list[int] = []  # slots left
        self.microbatch: list[int] = []  # when it runs
        self.level: list[float] = []  # the work up to which its microbatch is filled
        self.group_of = [-1] * tables.load.shape[1]  # the group of every sequence, -1 before it has one

    def copy(self) -> _Groups:
        """Return groups that can be filled while these stay as they are."""
        other = _Groups(self.tables, self.ranks)
        for name in ("degree", "load", "free", "microbatch", "level", "group_of"):
            setattr(other, name, list(getattr(self, name)))
        other.count = self.count
        return other

    def open(self, one: _Microbatch, numbers: Sequence[int]) -> None:
        """Add a microbatch with the groups of its long sequences, and singles beside them."""
        for at, members in enumerate(one.members, len(self.degree)):
            for n in members:
                self.group_of[numbers[n]] = at
        self.count += 1
        self._add(one.degree, one.load, one.free, one.level)
        self._add_singles(one.singles, one.level)

    def add_microbatch(self, level: float) -> None:
        """Add a microbatch of singles."""
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

    def complete(self, groups: Iterable[int], short: _Short) -> None:
        """Fill each group to its level: the longest sequence that fits, then the longest that still does."""
        for at in groups:
            degree, room, free = self.degree[at], self.level[at] - self.load[at], self.free[at]
            while (n := short.take_longest(degree, free, room)) >= 0:
                self.group_of[short.sequences[n]] = at
                room -= short.load[degree][n]
                free -= short.slots[degree][n]
            self.load[at], self.free[at] = self.level[at] - room, free

    def fill(self, short: Sequence[int], first: int) -> bool:
        """Put each sequence, longest first, into the group with most time; False if one fits no group."""
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
            self.group_of[i] = at
            self.free[at] -= slots[degree][n]
            self.load[at] += more
            heapq.heapreplace(heap, (below + more, at))
        return True

    def time(self) -> float:
        """Return the time of the step: the sum over its microbatches of the heaviest group's work."""
        heaviest = np.zeros(self.count)
        np.maximum.at(heaviest, self.microbatch, self.load)
        return float(heaviest.sum())


class _Short:
    """Sequences that fit one rank; each group takes the longest that it has slots and time for."""

    def __init__(self, tables: Tables, sequences: IntArray) -> None:
        order = sequences[np.argsort(tables.slots[0, sequences], kind="stable")]
        self.sequences: list[int] = order.tolist()  # the shortest first
        slots, load = tables.slots[:, order], tables.load[:, order]
        self.slots, self.load = slots.tolist(), load.tolist()  # at every degree, then for each sequence
        self._most = np.maximum.accumulate(load, axis=1).tolist()  # rises even if a user's cost does not
        self._left = list(range(len(order)))
        self.work, self.left_slots = float(load[0].sum()), int(slots[0].sum())  # their slots

    def take_longest(self, degree: int, free: int, room: float) -> int:
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


# --- ranks that wait only at the end of the step ------------------------------------------------------------
# Only a shared sequence makes ranks wait before the step ends. Each rank runs its largest groups first, and
# groups of c ranks begin at multiples of c. So all ranks of a group come from the same larger groups, at the
# same time, and wait for no other ranks. A *node* is an aligned set of ranks, as many as a group of a degree
# has.


def _nested_plan(tables: Tables, ranks: int) -> SharedBins:
    """Give each sequence the fewest ranks that keep it within an even share of the step's work."""
    even = tables.even_time(ranks)
    load, total = np.where(tables.possible, tables.load, np.inf), tables.total_work
    within = load <= even
    nest = _Nest(tables, ranks)
    chosen = np.where(within.any(axis=0), within.argmax(axis=0), load.argmin(axis=0))
    nest.fill(nest.share(chosen, even, tables.possible & (total <= _WORTH * total.min(axis=0))))
    microbatch, first = np.array(nest.microbatch), np.array(nest.first)
    laid = np.lexsort((first, microbatch))
    return _bins(tables, nest, laid, first[laid], microbatch[laid])


class _Nest:
    """Groups of ranks that are being filled, from the largest degree to single ranks."""

    def __init__(self, tables: Tables, ranks: int) -> None:
        self.tables, self.ranks, self.count = tables, ranks, 0  # M
        self.group_of = [-1] * tables.load.shape[1]  # the group of every sequence, -1 before it has one
        self.degree: list[int] = []  # index of each group's degree
        self.first: list[int] = []  # first rank of each group
        self.microbatch: list[int] = []  # when it runs
        self.load: list[float] = []  # work of each of its ranks
        self.work = [0.0] * (ranks // tables.degrees[-1])  # the total of each rank of a node
        self.used = [0] * len(self.work)  # microbatches of each node

    def share(self, chosen: IntArray, even: float, worth: BoolArray) -> IntArray:
        """Put sequences of several ranks into groups, on the ranks that have least to do."""
        waiting = np.argsort(-self.tables.slots[0], kind="stable")
        for at in range(len(self.tables.degrees) - 1, 0, -1):
            own = chosen[waiting] == at
            groups = self._open_groups(at, waiting[own])
            waiting = waiting[~own]
            if groups:
                self._fill_up(groups, at, waiting[worth[at, waiting]][::-1], even)
                waiting = waiting[[self.group_of[i] < 0 for i in waiting.tolist()]]
            self.work = [each for each in self.work for _ in range(2)]  # a node becomes two of half the ranks
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

    def _put(self, i: int, group: int, node: int, load: float) -> None:
        self.group_of[i] = group
        self.load[group] += load
        self.work[node] += load

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

    def _fill_up(
        self, groups: dict[int, tuple[int, int]], at: int, candidates: IntArray, even: float
    ) -> None:
        """Give the slots that groups have left to the longest candidates, up to an even share of work."""
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
        added = _added_work(np.array(self.work), float(self.tables.load[0, short].sum()))
        slots = added * (self.tables.slots[0, short].sum() / added.sum())
        packs = np.ceil(slots / (_FULL_SINGLES * self.tables.room[0]) - 1e-9).astype(np.int64)
        return max(1, int((used + packs).max()))

    def _fill_in(self, short: IntArray, count: int) -> bool:
        """Fill single ranks in given microbatches; False, with nothing changed, if one fits nowhere."""
        # Ranks without the slots for one sequence wait until a later sequence, which is shorter, fits them.
        room = self.tables.room[0]
        free = [[room] * (count - used) for used in self.used]
        heap = [(done, rank) for rank, done in enumerate(self.work)]
        heapq.heapify(heap)
        waiting: list[tuple[int, float, int]] = []  # (-most slots left in a microbatch, work, rank)
        placed: list[tuple[int, int, int, float]] = []
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
            placed.append((i, rank, place, load))
            heapq.heapreplace(heap, (done + load, rank))
        groups = [[self._add(0, rank) for _ in left] for rank, left in enumerate(free)]
        for i, rank, place, load in placed:
            self._put(i, groups[rank][place], rank, load)
        return True


def _added_work(work: FloatArray, more: float) -> FloatArray:
    """Return the extra work of each rank if ``more`` goes to the least loaded ranks first."""
    rising = np.sort(work)
    below = np.arange(1, len(work) + 1) * rising - np.cumsum(rising)  # to raise all before up to each
    filled = int(np.searchsorted(below, more, side="right"))
    level = (more + float(rising[:filled].sum())) / filled
    added: FloatArray = np.maximum(level - work, 0.0)
    return added
