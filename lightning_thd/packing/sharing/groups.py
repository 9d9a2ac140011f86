"""The sequences of a step -> microbatches of groups of ranks: short ones whole on a rank, long ones shared.

Every microbatch of a step tiles all ranks with groups of 1, 2, 4, ... neighbours. A group runs one pack, each
rank its share of it. So each sequence gets the degree it needs, for its memory and for an even step, and
all ranks run the same number of microbatches.

Legend: R ranks, M microbatches of each, a seat is one rank in one microbatch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lightning_thd.packing.lengths import check_count
from lightning_thd.packing.sharing.degrees import Sharing, check_tiling

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

# How far above an even share of the work a sequence may be before more ranks share it: the plan that waits
# least is taken.
_SLACKS = (1.0, 0.6, 1.4)
_EVEN_ENOUGH = 1.02  # work waited for, of an even share: below it nothing else is tried
_WORTH = 0.01  # of the work waited for: what another plan must save
_FULL = 0.92  # of all slots: what is left lets work be spread evenly
_WASTE = 1.3  # work of a sequence with its exchange, of that at the cheapest degree: no more is spent on it
_RECENT = 8  # groups that are tried before another is opened
_MORE_MICROBATCHES = 8  # beyond the fewest that hold all slots, before a plan is given up


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SharedBins:
    """Which sequences each group runs.

    Attributes:
        order: int64 ``[S]``, positions of the sequences, group after group.
        offsets: int64 ``[G + 1]``, of each group in ``order``.
        degree: int64 ``[G]``, ranks of each group.
        first: int64 ``[G]``, first rank of each group.
        microbatch: int64 ``[G]``, when it runs.
        load: float64 ``[G]``, work of each rank of the group, its exchange included.
        num_microbatches: of every rank.
    """

    order: IntArray
    offsets: IntArray
    degree: IntArray
    first: IntArray
    microbatch: IntArray
    load: FloatArray
    num_microbatches: int


def share_out(
    lengths: npt.ArrayLike,
    capacity: int,
    *,
    ranks: int,
    sharing: Sharing,
    cost: Callable[[IntArray], FloatArray],
) -> SharedBins:
    """Give every sequence a degree, a microbatch and ranks, all planned together.

    Args:
        lengths: ints ``[S]``, tokens of each sequence.
        capacity: most slots of a rank in a microbatch.
        ranks: R; ``sharing.max_degree`` divides it.
        sharing: how many ranks may share a sequence.
        cost: work of sequences by their tokens.

    Returns:
        The groups; their degrees in a microbatch sum up to R. Lengths ``[8, 2, 2]``, capacity 4, 4 ranks and
        degrees up to 2 make a group of 2 for the first and one rank each for the others.

    Raises:
        ValueError: for a sequence that fits at no degree, or ranks that groups do not tile.
    """
    check_count("capacity", capacity, "It is the most slots of one rank.")
    check_tiling(ranks, sharing.max_degree)
    values = np.asarray(lengths, dtype=np.int64)
    tables = _Tables.of(values, capacity, sharing, cost)
    needed = int(tables.slots[tables.least, np.arange(len(values))].sum())
    fewest = max(1, math.ceil(needed / (ranks * capacity * _FULL)))
    most = 2 * fewest + _MORE_MICROBATCHES
    for waste in (_WASTE, np.inf):
        best = _best_plan(tables, ranks, range(fewest, most), waste)
        if best is not None:
            return best
    raise ValueError(
        f"{len(values)} sequences fit no {most - 1} microbatches of {ranks} ranks "
        f"with {capacity} slots each. Raise capacity."
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Tables:
    """Slots and load of every sequence at every degree; ``least`` is the index of the first that fits."""

    degrees: list[int]
    room: list[int]
    slots: IntArray
    load: FloatArray
    least: IntArray

    @classmethod
    def of(
        cls, lengths: IntArray, capacity: int, sharing: Sharing, cost: Callable[[IntArray], FloatArray]
    ) -> _Tables:
        degrees = sharing.degrees
        rooms, multiples = zip(*(sharing.room(capacity, degree) for degree in degrees), strict=True)
        slots = np.stack([-(-lengths // multiple) * multiple for multiple in multiples])
        ranks = np.array(degrees, dtype=np.float64)[:, None]
        token = float(cost(np.array([1024]))[0]) / 1024  # near a token's linear work
        exchanged = np.array(sharing.exchanges)[:, None] * token * slots
        load = (cost(lengths)[None] + exchanged) / ranks
        fits = slots <= np.array(rooms)[:, None]
        if not fits[-1].all():
            worst = int(np.argmax(slots[-1]))
            raise ValueError(
                f"Sequence {worst} has {lengths[worst]} tokens, which fit at no degree: {degrees[-1]} ranks "
                f"of {capacity} slots hold {rooms[-1]}. Raise max_context_parallel_size to "
                f"{_degree_for(int(lengths[worst]), capacity)}, raise capacity, or set oversize='drop', "
                "'truncate' or 'split'."
            )
        return cls(degrees=degrees, room=list(rooms), slots=slots, load=load, least=np.argmax(fits, axis=0))


def _degree_for(length: int, capacity: int) -> int:
    return 1 << (-(-length // capacity) - 1).bit_length()


@dataclass(slots=True)
class _Group:
    """A group that is being filled: index of its degree, load of a rank, slots left, sequences."""

    degree: int
    load: float
    free: int
    members: list[int] = field(default_factory=list)
    microbatch: int = -1


def _best_plan(tables: _Tables, ranks: int, counts: range, waste: float) -> SharedBins | None:
    """Try numbers of microbatches and slacks, and keep the plan whose slowest ranks take least time."""
    best, least = None, np.inf
    for count in counts:
        if best is not None:
            break
        for slack in _SLACKS:
            plan = _plan(tables, ranks, count, slack, waste)
            if plan is None:
                continue
            waits, even = _waiting(plan, ranks)
            if waits < least * (1 - _WORTH):
                best, least = plan, waits
            if waits <= _EVEN_ENOUGH * even:
                return best
    return best


def _waiting(plan: SharedBins, ranks: int) -> tuple[float, float]:
    """Return the work that all ranks wait for, microbatch after microbatch, and an even share of all work."""
    slowest = np.zeros(plan.num_microbatches)
    np.maximum.at(slowest, plan.microbatch, plan.load)
    return float(slowest.sum()), float((plan.load * plan.degree).sum()) / ranks


def _plan(tables: _Tables, ranks: int, count: int, slack: float, waste: float) -> SharedBins | None:
    """Open groups for the long, seat like with like, and fill all seats with the short up to one level."""
    columns = np.arange(tables.load.shape[1])
    level = float(tables.load[tables.least, columns].sum()) / (ranks * count) * slack
    possible = np.arange(len(tables.degrees))[:, None] >= tables.least
    spent = np.where(possible, tables.load * np.array(tables.degrees)[:, None], np.inf)
    worth = spent <= waste * spent.min(axis=0)
    enough = worth & (tables.load <= level)
    cheapest = np.where(worth, tables.load, np.inf).argmin(axis=0)
    chosen = np.where(enough.any(axis=0), enough.argmax(axis=0), cheapest)
    load = tables.load[chosen, columns]
    opens = (chosen > 0) | (load > level)  # what has a group opened for it
    groups = _open_groups(tables, chosen, np.flatnonzero(opens), level)
    late = _choose_microbatches(tables, groups, ranks, count)
    short = np.concatenate([np.flatnonzero(~opens), np.array(late, dtype=np.int64)])
    short = short[np.argsort(-tables.slots[0, short], kind="stable")]
    groups = [group for group in groups if group.microbatch >= 0]
    _add_singles(tables, groups, ranks, count)
    room = _room(tables, groups, ranks, count, float(load[short].sum()))
    if not _fill(tables, groups, short, room, worth):
        return None
    return _seat(tables, groups, ranks, count)


def _open_groups(tables: _Tables, chosen: IntArray, which: IntArray, level: float) -> list[_Group]:
    """Open groups for the sequences that need them, the largest first; several share one up to the level."""
    groups: list[_Group] = []
    recent: list[_Group] = []
    for i in which[np.lexsort((-tables.load[chosen[which], which], -chosen[which]))].tolist():
        degree = int(chosen[i])
        slots, load = int(tables.slots[degree, i]), float(tables.load[degree, i])
        for group in recent:
            if group.degree == degree and group.free >= slots and group.load + load <= level:
                break
        else:
            group = _Group(degree, 0.0, tables.room[degree])
            groups.append(group)
            recent = [group, *recent[:_RECENT]]
        _put(group, i, slots, load)
    return groups


def _choose_microbatches(tables: _Tables, groups: list[_Group], ranks: int, count: int) -> list[int]:
    """Let groups of like load run at the same time; return the sequences of those that find no seats."""
    free = [ranks] * count
    late: list[int] = []
    for group in sorted(groups, key=lambda group: -group.load):
        degree = tables.degrees[group.degree]
        group.microbatch = next((j for j, seats in enumerate(free) if seats >= degree), -1)
        if group.microbatch < 0:
            late += group.members
        else:
            free[group.microbatch] -= degree
    return late


def _add_singles(tables: _Tables, groups: list[_Group], ranks: int, count: int) -> None:
    """Make every seat that no group has taken a group of its own."""
    free = [ranks] * count
    for group in groups:
        free[group.microbatch] -= tables.degrees[group.degree]
    groups += [_Group(0, 0.0, tables.room[0], microbatch=j) for j in range(count) for _ in range(free[j])]


def _room(tables: _Tables, groups: list[_Group], ranks: int, count: int, work: float) -> list[float]:
    """Say how much of the work that is left each group takes until all of its microbatch are even.

    A microbatch waits for its heaviest group anyway, so the others are filled up to that; what is left over
    is spread evenly, as water finds its level.
    """
    peaks, filled = np.zeros(count), np.zeros(count)
    for group in groups:
        peaks[group.microbatch] = max(peaks[group.microbatch], group.load)
        filled[group.microbatch] += tables.degrees[group.degree] * group.load
    total = float(filled.sum()) + work
    falling = np.sort(peaks)[::-1]
    even = total / (ranks * count)
    for heavy in range(count):  # the heaviest microbatches stay as they are, the others share the rest
        even = (total - ranks * float(falling[:heavy].sum())) / (ranks * (count - heavy))
        if falling[heavy] <= even:
            break
    levels = np.maximum(peaks, even).tolist()
    return [levels[group.microbatch] - group.load for group in groups]


def _fill(
    tables: _Tables,
    groups: list[_Group],
    short: IntArray,
    room: list[float],
    worth: npt.NDArray[np.bool_],
) -> bool:
    """Put each sequence, longest first, into the group with most room for work that has slots for it.

    A group without the slots for one sequence waits until the sequences, which get shorter, fit it again. One
    whose exchange is not worth it for a sequence is not for shorter ones either.
    """
    heap = [(-most, at) for at, most in enumerate(room)]
    heapq.heapify(heap)
    waiting: list[tuple[int, float, int]] = []  # (-slots left, -room, group)
    slots, load = tables.slots.T[short].tolist(), tables.load.T[short].tolist()
    least, worthy = tables.least[short].tolist(), worth.T[short].tolist()
    for n, i in enumerate(short.tolist()):
        while waiting and -waiting[0][0] >= slots[n][groups[waiting[0][2]].degree]:
            _, below, at = heapq.heappop(waiting)
            heapq.heappush(heap, (below, at))
        other = []
        while heap:
            below, at = heap[0]
            group = groups[at]
            if group.degree < least[n]:
                other.append(heapq.heappop(heap))
            elif not worthy[n][group.degree]:
                heapq.heappop(heap)
            elif group.free < slots[n][group.degree]:
                heapq.heappop(heap)
                heapq.heappush(waiting, (-group.free, below, at))
            else:
                break
        else:
            return False
        more = load[n][group.degree]
        _put(group, i, slots[n][group.degree], more)
        heapq.heapreplace(heap, (below + more, at))
        for entry in other:
            heapq.heappush(heap, entry)
    return True


def _put(group: _Group, i: int, slots: int, load: float) -> None:
    group.members.append(i)
    group.free -= slots
    group.load += load


def _seat(tables: _Tables, groups: list[_Group], ranks: int, count: int) -> SharedBins:
    """Lay the groups of a microbatch, largest first, over the ranks: powers of two then begin aligned."""
    groups.sort(key=lambda group: (group.microbatch, -group.degree, -group.load))
    degree = np.array([tables.degrees[group.degree] for group in groups])
    seat = np.cumsum(degree) - degree
    sizes = [len(group.members) for group in groups]
    return SharedBins(
        order=np.array([i for group in groups for i in group.members], dtype=np.int64),
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        degree=degree,
        first=seat % ranks,
        microbatch=seat // ranks,
        load=np.array([group.load for group in groups]),
        num_microbatches=count,
    )
