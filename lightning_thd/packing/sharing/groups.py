"""The sequences of a step -> microbatches of groups of ranks: short ones whole on a rank, long ones shared.

Every microbatch of a step tiles all ranks with groups of 1, 2, 4, ... neighbours. A group runs one pack, each
rank its share of it. So each sequence gets the degree it needs, for its memory and for an even step, and
all ranks run the same number of microbatches. Where ranks wait for each other in every microbatch, each is
made even; where they do at the end of the step alone, what each rank runs in all is. Sets of ranks that wait
within the set, as those that share weights in HSDP, get even work each and make their microbatches even.

Legend: R ranks, M microbatches of each, a seat is one rank in one microbatch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_thd._checks import host_ints, instance, whole_number
from lightning_thd.packing.sharing.degrees import Sharing, check_tiling
from lightning_thd.packing.sharing.levels import Filler, Long
from lightning_thd.packing.sharing.nested import Nest
from lightning_thd.packing.sharing.seats import Seats, Short
from lightning_thd.packing.sharing.tables import FloatArray, IntArray, Tables

_FULL = 0.96  # of all slots: what is left lets work be spread evenly
_LONG = 0.7  # of a microbatch's even share of the work: what a short sequence takes at most
_LAST = 0.5  # of a microbatch: what the last one gets less, as short sequences come out even anyway
_FEW = 0.1  # of a microbatch's slots: so few are tried on top of the others before they get one of their own
# Lowest work of a microbatch that is tried, of its even share, and how many tries a step of so many sequences
# has time for; one plan within a hundredth of the least time that any takes is enough. Found on the cases of
# benchmarks.dynamic_cp and on random steps: those of two sequences a rank gain 3 per cent by five tries.
_LOWEST = (0.95, 0.6, 0.8, 1.25, 0.7)
_TRIES = {512: 5, 2048: 3}
_EVEN_ENOUGH = 1.01
_SETS = (
    16  # of ranks that wait for each other, planned apart: more are planned in pairs, which takes less time
)
_IDLE = (
    0.005  # of the work: what all ranks must leave undone before sets are planned apart for many sequences
)
_NEST_WASTE = 1.05  # work of what fills up a group, of that at its cheapest, if steps alone need to be even


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SharedBins:
    """The sequences of each group of ranks, and which ranks and microbatch the group is.

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
    """Assign a degree, a microbatch and ranks to every sequence, all planned together.

    Args:
        lengths: ints ``[S]``, tokens of each sequence.
        capacity: most slots of a rank in a microbatch.
        ranks: R; ``sharing.max_degree`` divides it.
        sharing: how many ranks may share a sequence, and until when they wait for each other.
        cost: work of sequences by their tokens.

    Returns:
        The groups; their degrees in a microbatch sum up to R. Lengths ``[8, 2, 2]``, capacity 4, 4 ranks and
        degrees up to 2 make a group of 2 for the first and one rank each for the others.

    Raises:
        ValueError: for no sequence, one that fits at no degree, work that is no finite number above 0, or
            ranks that groups do not tile.
    """
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


def _nested_plan(tables: Tables, ranks: int) -> SharedBins:
    """Give each sequence the fewest ranks that keep it within an even share of the step's work."""
    even = tables.even_time(ranks)
    load = np.where(tables.possible, tables.load, np.inf)
    within = load <= even
    nest = Nest(tables, ranks)
    chosen = np.where(within.any(axis=0), within.argmax(axis=0), load.argmin(axis=0))
    nest.fill(nest.share(chosen, even, tables.worth(_NEST_WASTE)))
    home, microbatch, first = np.array(nest.home), np.array(nest.microbatch), np.array(nest.first)
    laid = np.lexsort((first, microbatch))
    place = np.argsort(laid)
    return SharedBins(
        order=np.argsort(place[home], kind="stable"),
        offsets=np.concatenate([[0], np.cumsum(np.bincount(place[home], minlength=len(laid)))]),
        degree=np.array(tables.degrees)[np.array(nest.degree)[laid]],
        first=first[laid],
        microbatch=microbatch[laid],
        load=np.array(nest.load)[laid],
        num_microbatches=nest.count,
    )


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
        idle = np.arange((count - ends) * together)  # ranks of sets that are done early
        sizes.append(np.zeros(len(idle), dtype=np.int64))
        ones = np.ones_like(idle)
        rows.append((ones, at * together + idle % together, ends + idle // together, np.zeros(len(idle))))
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
    """Make each microbatch even: the longest sequences that are left first, and shorter ones beside them."""
    fewest = max(1, math.ceil(int(tables.slots[0].sum()) / (_FULL * ranks * tables.room[0])))
    even = tables.even_time(ranks) / fewest
    short = (tables.least == 0) & (tables.load[0] <= _LONG * even)
    numbers = np.flatnonzero(~short)
    numbers = numbers[np.argsort(-tables.slots[0, numbers], kind="stable")]
    long = Long(tables, ranks, numbers, Filler.of(tables, short))
    enough, best = _EVEN_ENOUGH * tables.least_time(ranks), None
    for lowest in _LOWEST[:tries]:
        seats = _seats(long, np.flatnonzero(short), even, lowest)
        if best is None or seats.slowest() < best.slowest():
            best = seats
        if best.slowest() <= enough:
            break
    assert best is not None
    return _seat(best)


def _seats(long: Long, short: IntArray, even: float, lowest: float) -> Seats:
    """Fill microbatches with the long sequences, then, as long as any are left, with the short ones."""
    tables, ranks = long.tables, long.ranks
    slots = ranks * tables.room[0]
    found, alone = long.microbatches(even, lowest)
    seats = Seats(tables, ranks)
    numbers = long.sequences.tolist()
    for one in found:
        seats.open(one, numbers)
    rest = Short(tables, np.concatenate([short, long.sequences[alone]]))
    seats.complete(np.lexsort((seats.load, seats.degree, seats.microbatch)).tolist(), rest)
    while rest.left_slots > _FULL * slots:
        left = math.ceil(rest.left_slots / (_FULL * slots))
        full = rest.work / rest.left_slots * _FULL * tables.room[0]
        at = len(seats.degree)
        seats.add_microbatch(max(min(rest.work / ranks / (left - _LAST), full), rest.heaviest()))
        seats.complete(range(at, len(seats.degree)), rest)
    return _last(seats, rest, slots) if rest.left_slots else seats


def _last(seats: Seats, rest: Short, slots: int) -> Seats:
    """Put the shortest sequences into a last microbatch, or on top of the others where that is faster."""
    left, best = rest.left(), None
    count = 0 if seats.count and rest.left_slots <= _FEW * slots else 1
    while True:
        for first in (len(seats.load), 0) if count else (0,):  # its own ranks first, then any
            tried = seats.copy()
            for _ in range(count):
                tried.add_microbatch(rest.work / seats.ranks / count)
            if tried.fill(left, first):
                best = tried if best is None or tried.slowest() < best.slowest() else best
                break
        if count and best is not None:
            return best
        count += 1


def _seat(seats: Seats) -> SharedBins:
    """Assign a microbatch's groups to ranks, largest first, so that each starts at a multiple of its size."""
    load, index, home = np.array(seats.load), np.array(seats.degree), np.array(seats.home)
    microbatch = np.array(seats.microbatch)
    laid = np.lexsort((-load, -index, microbatch))
    place = np.empty_like(laid)
    place[laid] = np.arange(len(laid))
    degree = np.array(seats.tables.degrees)[index[laid]]
    seat = np.cumsum(degree) - degree
    return SharedBins(
        order=np.argsort(place[home], kind="stable"),
        offsets=np.concatenate([[0], np.cumsum(np.bincount(place[home], minlength=len(laid)))]),
        degree=degree,
        first=seat % seats.ranks,
        microbatch=seat // seats.ranks,
        load=load[laid],
        num_microbatches=seats.count,
    )
