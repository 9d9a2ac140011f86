"""The sequences of a step -> microbatches of groups of ranks: short ones whole on a rank, long ones shared.

Every microbatch of a step tiles all ranks with groups of 1, 2, 4, ... neighbours. A group runs one pack, each
rank its share of it. So each sequence gets the degree it needs, for its memory and for an even step, and
all ranks run the same number of microbatches. Where ranks wait for each other in every microbatch, each is
made even; where they do at the end of the step alone, what each rank runs in all is.

Legend: R ranks, M microbatches of each, a seat is one rank in one microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_thd.packing.lengths import as_lengths, check_count, check_type
from lightning_thd.packing.sharing.degrees import Sharing, check_tiling
from lightning_thd.packing.sharing.nested import Nest
from lightning_thd.packing.sharing.seats import Seats
from lightning_thd.packing.sharing.tables import BoolArray, FloatArray, IntArray, Tables

# What is tried; the plan whose slowest ranks take least time is kept. How far above an even share of the work
# a sequence may be before more ranks share it, and how much work, exchanges included, it may take in all, of
# what it takes at the cheapest degree. Of 18 pairs these two left 0.7 per cent to the best of all, on
# chats and long documents of benchmarks.dynamic_cp.
_TRIES = ((0.7, 1.3), (0.7, math.inf))
_WASTE = 1.3  # the same of a sequence that fills up the group of others
_NEST_WASTE = 1.05  # the same where microbatches need not be even: slots are all that this saves
_EVEN_ENOUGH = 1.03  # work waited for, of the least that any plan could: below it nothing else is tried
_WORTH = 0.01  # of the work waited for: what another plan must save
_FULL = 0.92  # of all slots: what is left lets work be spread evenly
_MORE_MICROBATCHES = 8  # beyond the fewest that hold all slots, before a plan is given up


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
    check_count("capacity", capacity, "It is the most slots of one rank.")
    check_type("sharing", sharing, Sharing, "Pass Sharing(max_degree=...).")
    check_tiling(ranks, sharing.max_degree)
    values = as_lengths(lengths)
    if not values.size:
        raise ValueError("lengths is empty: there is no sequence to share out. Pass the tokens of each.")
    tables = Tables.of(values, capacity, sharing, cost)
    if sharing.waits == "step":
        return _nested_plan(tables, ranks)
    needed = int(tables.slots[tables.least, np.arange(len(values))].sum())
    fewest = max(1, math.ceil(needed / (ranks * capacity * _FULL)))
    most = 2 * fewest + _MORE_MICROBATCHES
    for filling in (_WASTE, math.inf):
        best = _best_plan(tables, ranks, range(fewest, most), filling)
        if best is not None:
            return best
    raise ValueError(
        f"{len(values)} sequences fit no {most - 1} microbatches of {ranks} ranks with {capacity} slots "
        "each. Pass a cost that grows with the tokens, as Cost() does, or raise capacity."
    )


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


def _best_plan(tables: Tables, ranks: int, counts: range, filling: float) -> SharedBins | None:
    """Try several numbers of microbatches and keep the plan whose slowest ranks take least time."""
    best, least, last = None, math.inf, counts.stop
    enough = _EVEN_ENOUGH * tables.least_time(ranks)
    tries = [(slack, tables.worth(waste)) for slack, waste in _TRIES]
    fills = tables.worth(filling)
    for count in counts:
        if count > last or not tries:
            break
        for one in tuple(tries):
            plan = _plan(tables, ranks, count, *one, fills)
            if plan is None:
                continue
            tries = [other for other in tries if other is not one]
            last = min(last, count + 1)  # the others may need one more
            slowest = np.zeros(plan.num_microbatches)
            np.maximum.at(slowest, plan.microbatch, plan.load)
            if slowest.sum() < least * (1 - _WORTH):
                best, least = plan, float(slowest.sum())
            if least <= enough:
                return best
    return best


def _plan(
    tables: Tables, ranks: int, count: int, slack: float, worth: BoolArray, filling: BoolArray
) -> SharedBins | None:
    """Plan a step of given microbatches: share long sequences, then fill all groups up to one level."""
    columns = np.arange(tables.load.shape[1])
    load = tables.load[tables.least, columns]
    even = float((load * np.array(tables.degrees)[tables.least]).sum()) / (ranks * count)
    long = np.flatnonzero((tables.least > 0) | (load > even * slack))
    seats = Seats(tables, ranks, count)
    seats.share_long(long[np.argsort(-tables.slots[0, long], kind="stable")], even, slack, worth)
    seats.add_singles()
    short = np.flatnonzero(np.array(seats.home) < 0)
    short = short[np.argsort(-tables.slots[0, short], kind="stable")]
    if not seats.fill(short, seats.rooms(float(load[short].sum())).tolist(), filling):
        return None
    return _seat(seats)


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
