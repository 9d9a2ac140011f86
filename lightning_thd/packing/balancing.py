"""The sequences of a step -> the same number of microbatches per rank, of similar work, within the capacity.

The microbatches that all ranks run at the same time are a microstep. It lasts as long as its heaviest
microbatch. So the work must be equal within a microstep, but may differ between microsteps. The longest
sequences share a heavy microstep, whose other microbatches are filled with shorter sequences. A bin is a
microbatch before it has a rank.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lightning_thd._checks import host_ints, instance, whole_number
from lightning_thd.packing.bins import Packing, best_fit, regrouped
from lightning_thd.packing.cost import Cost, media_table
from lightning_thd.packing.lengths import (
    MOST_RANKS,
    UNBOUNDED,
    Slots,
    check_capacity,
    check_patches,
    too_many_patches,
)

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

MOST_MICROBATCHES = 2**24  # A step with more microbatches, over all ranks, is probably a mistake.
_UNEVEN = 1.05  # With max_patches, a plan 5 % above its lower bound is also tried with one more microbatch.
_EVEN_ENOUGH = 1.01  # A plan that lasts at most 1 % longer than the least possible is not improved.


class Scheduler(Protocol):
    """The signature of a function that a user passes in place of :func:`balance`."""

    def __call__(
        self, lengths: IntArray, capacity: int, *, dp: int, cost: Cost
    ) -> Sequence[Sequence[npt.ArrayLike]]:
        """Return a list of microbatches per rank; a microbatch is a list of positions in ``lengths``."""


def balance(
    lengths: npt.ArrayLike,
    capacity: int,
    *,
    dp: int,
    cost: Cost | None = None,
    num_microbatches: int | None = None,
    patches: npt.ArrayLike | None = None,
    max_patches: int | None = None,
) -> list[list[IntArray]]:
    """Distribute sequences so that all ranks have nearly equal work and no microbatch is above the capacity.

    Args:
        lengths: ints ``[S]``, slots of each sequence.
        capacity: most slots of a microbatch.
        dp: data-parallel ranks.
        cost: work of a sequence; the default fits a model with hidden size 4096.
        num_microbatches: microbatches of each rank; None takes the fewest that are found, or one more if
            ``max_patches`` makes the work uneven.
        patches: image patches of each sequence, ints ``[S]``, or ``[S, 2]`` with the sum over frames of
            squared patch counts; None for text.
        max_patches: most patches of a microbatch; None sets no bound.

    Returns:
        A list of microbatches per rank, the same number for all. Each is an int64 array of positions in
        ``lengths``, the longest sequence first.
    """
    check_capacity(capacity)
    whole_number(dp, "dp", least=1, most=MOST_RANKS, advice="Pass the number of data-parallel ranks.")
    if num_microbatches is not None:
        whole_number(num_microbatches, "num_microbatches", least=1, most=MOST_MICROBATCHES // dp)
    if cost is not None:
        instance(cost, "cost", Cost, advice="Pass Cost(linear=..., quadratic=...).")
    values = host_ints(lengths, "lengths", least=1, advice="Leave empty sequences out.")
    if len(values) and values.max() > capacity:
        longest = int(values.argmax())
        raise ValueError(
            f"Sequence {longest} has {values[longest]} tokens but capacity={capacity}. Raise capacity."
        )

    media = None if patches is None else media_table(patches, len(values))
    slots = Slots(usable=int(capacity), multiple=1, patches=check_patches(max_patches))
    num_patches = np.zeros_like(values) if media is None else media[:, 0]
    if len(values) and num_patches.max() > slots.patches:
        worst = int(num_patches.argmax())
        raise ValueError(too_many_patches(worst, int(num_patches[worst]), slots.patches))

    if cost is None:
        cost = Cost()
    order, offsets = balanced_bins(
        values, cost(values, media), slots, dp=dp, num_microbatches=num_microbatches, patches=num_patches
    )
    bins = np.split(order, offsets[1:-1])
    per_rank = len(bins) // dp
    return [bins[rank * per_rank : (rank + 1) * per_rank] for rank in range(dp)]


def balanced_bins(
    lengths: IntArray,  # a sequence above the capacity gets a bin of its own
    work: FloatArray,
    slots: Slots,
    *,
    dp: int,
    num_microbatches: int | None = None,  # None takes the fewest that are found
    packs: Packing | None = None,  # packs to use instead of those of best fit
    patches: IntArray | None = None,
) -> tuple[IntArray, IntArray]:
    """Put sequences in bins of equal work; return positions ``[S]`` by rank and microbatch, and offsets."""
    if patches is None:
        slots = replace(slots, patches=UNBOUNDED)
        patches = np.zeros_like(lengths)
    # A sequence that is too large takes a whole bin, so that no other sequence joins it.
    over = (lengths > slots.usable) | (patches > slots.patches)
    step = Problem(np.where(over, slots.usable, lengths), np.where(over, 0, patches), work, slots, dp)
    owner, count = _choose_bins(step, num_microbatches, packs)

    # Longest first inside a bin, because attention runs neighbours of equal length as one batch.
    order = np.lexsort((-lengths, owner))
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(owner, minlength=count), out=offsets[1:])
    return order_by_rank(order, offsets, step.bin_work(owner, count), dp)


def _choose_bins(step: Problem, num_microbatches: int | None, packs: Packing | None) -> tuple[IntArray, int]:
    """Return the bin of each sequence and the number of bins, from the cheapest plan that is even enough."""
    slots = step.slots
    dp = step.dp
    # First the plan that costs least to make: sequences by work, in as few bins as their sum allows.
    count = dp * (step.fewest() if num_microbatches is None else num_microbatches)
    spread = step.spread(count)
    if spread.owner is not None and spread.even:
        return spread.owner, count

    if packs is None:
        packs = best_fit(step.lengths, slots, step.patches)
    least = max(1, -(-len(packs) // dp))  # microbatches that best fit needs
    wanted = dp * (least if num_microbatches is None else num_microbatches)
    owner = step.best(wanted, packs, spread if wanted == count else None)
    if owner is None:
        raise ValueError(
            f"{len(step.lengths)} sequences need {len(packs)} packs of {slots.usable} slots but dp={dp} with "
            f"num_microbatches={num_microbatches} has {wanted}. Pass num_microbatches={least}, or None."
        )

    # Bins whose patches are at the bound may leave no room to make the work equal. More bins have room.
    waits = step.waits(owner, wanted)
    if slots.patches < UNBOUNDED and num_microbatches is None and waits > step.least * _UNEVEN:
        more = wanted + dp
        roomier = step.best(more, packs)
        if roomier is not None and step.waits(roomier, more) * _UNEVEN < waits:
            return roomier, more
    return owner, wanted


@dataclass(frozen=True, slots=True)
class _Spread:
    """A plan that places sequences by work only, without a search."""

    owner: IntArray | None  # the bin of each sequence; None if a sequence does not fit
    even: bool  # whether the plan lasts about as short as any plan can


@dataclass(frozen=True, slots=True)
class Problem:
    """The sequences of a step, the slots and patches that a bin may hold, and the number of ranks."""

    lengths: IntArray  # int64 ``[S]``, slots of each sequence
    patches: IntArray  # int64 ``[S]``, image patches of each sequence
    work: FloatArray  # float64 ``[S]``, work of each sequence in the unit of ``Cost``
    slots: Slots  # what a bin may hold
    dp: int  # data-parallel ranks

    @property
    def bounds(self) -> list[tuple[IntArray, int]]:
        """Return the slots of each sequence and the most slots of a bin, then patches if they are bounded."""
        bounds = [(self.lengths, self.slots.usable)]
        if self.slots.patches != UNBOUNDED:
            bounds.append((self.patches, self.slots.patches))
        return bounds

    @property
    def least(self) -> float:
        """Return a lower bound of :func:`waiting`: the larger of an even share and the largest work."""
        return max(float(self.work.sum()) / self.dp, float(self.work.max(initial=0.0)))

    def fewest(self) -> int:
        """Return the number of microbatches per rank if every microbatch were full."""
        full = max(-(-int(sizes.sum()) // most) for sizes, most in self.bounds)
        return max(1, -(-full // self.dp))

    def bin_work(self, owner: IntArray, count: int) -> FloatArray:
        """Return the work of each bin, float64 ``[count]``; ``owner`` is the bin of each sequence."""
        return np.bincount(owner, weights=self.work, minlength=count).astype(np.float64)

    def waits(self, owner: IntArray, count: int) -> float:
        """Return the duration of a step in units of work, see :func:`waiting`."""
        return waiting(self.bin_work(owner, count), self.dp)

    def spread(self, count: int) -> _Spread:
        """Place sequences by work: in bins of equal work, then in microsteps of their own levels."""
        items = _items(self)
        room = (self.slots.usable, self.slots.patches)
        best: IntArray | None = None
        least = np.inf

        for below in (np.zeros(count), _levels(items, self.dp, count // self.dp)):
            if best is not None and not below.any():  # the same levels again
                break
            owner = _most_work_first(items, room, below)
            waits = np.inf if owner is None else self.waits(owner, count)
            if waits < least:
                best = owner
                least = waits
            if least <= self.least * _EVEN_ENOUGH:
                return _Spread(best, even=True)

        return _Spread(best, even=False)

    def best(self, count: int, packs: Packing, spread: _Spread | None = None) -> IntArray | None:
        """Return the fastest of three plans, by work, best fit or microsteps; None if all need more bins."""
        if spread is None:
            spread = self.spread(count)
        if spread.owner is not None and spread.even:
            return spread.owner

        packed: IntArray | None = None
        if len(packs) <= count:
            packed = np.empty(len(self.work), np.int64)
            packed[packs.indices] = np.repeat(np.arange(len(packs)), np.diff(packs.offsets))
        levelled = fill_microsteps(self, count // self.dp, enough=self.least * _EVEN_ENOUGH)
        plans = [owner for owner in (spread.owner, packed, levelled) if owner is not None]
        return min(plans, key=lambda owner: self.waits(owner, count), default=None)


def _levels(items: list[_Item], dp: int, num_microbatches: int) -> FloatArray:
    """Return how much less work each bin should get than the heaviest bin, float64 ``[bins]``."""
    # The largest sequences set the work of the first microsteps. The rest of the work is shared equally.
    below = np.zeros(dp * num_microbatches)
    work_left = sum(work for work, _, _, _ in items)
    highest = 0.0
    for step in range(num_microbatches):
        mean = work_left / (dp * (num_microbatches - step))
        largest = items[step * dp][0] if step * dp < len(items) else 0.0
        level = max(mean, largest)
        highest = max(highest, level)
        below[step * dp :] = highest - level
        if largest <= mean:  # this microstep and all later ones can have the mean
            break
        work_left -= dp * level
    return below


def order_by_rank(
    order: IntArray, offsets: IntArray, totals: FloatArray, dp: int
) -> tuple[IntArray, IntArray]:
    """Reorder bins by the rank and microbatch that :func:`assign_bins` gives them."""
    members, ends = regrouped(offsets, assign_bins(totals, dp))
    return order[members], ends


def scheduled_bins(
    scheduler: Scheduler,
    lengths: IntArray,
    slots: Slots,
    *,
    dp: int,
    cost: Cost,
    patches: IntArray | None = None,
) -> tuple[IntArray, IntArray]:
    """Call a user's scheduler; check that sequences fit and come once, with equally many bins per rank."""
    plan = [
        [np.asarray(members, np.int64) for members in microbatches]
        for microbatches in scheduler(lengths, slots.usable, dp=dp, cost=cost)
    ]
    numbers = sorted({len(microbatches) for microbatches in plan})
    if len(plan) != dp or len(numbers) != 1 or numbers[0] < 1:
        raise ValueError(
            f"The scheduler gave {len(plan)} ranks {numbers} microbatches; wanted {dp} with equally many."
        )

    bins = [members for microbatches in plan for members in microbatches]
    order = np.concatenate([np.empty(0, np.int64), *bins])
    if sorted(order.tolist()) != list(range(len(lengths))):
        raise ValueError(
            f"The scheduler used {order.tolist()[:9]}; it must use each of {len(lengths)} positions once."
        )

    bounds = [("slots", lengths, slots.usable)]
    if patches is not None:
        bounds.append(("patches", patches, slots.patches))
    for number, members in enumerate(bins):
        rank, microbatch = divmod(number, numbers[0])
        for unit, sizes, most in bounds:
            total = sizes[members].sum()
            if total > most and len(members) > 1:  # one sequence that is too large may have a bin
                raise ValueError(
                    f"The scheduler put {total} {unit} in microbatch {microbatch} of "
                    f"rank {rank}, above the {most} that fit. Fill it with fewer sequences."
                )
    return order, np.concatenate([[0], np.cumsum([len(members) for members in bins])])


def _most_work_first(items: list[_Item], room: tuple[int, int], below: FloatArray) -> IntArray | None:
    """Put each item in the bin with room and least work + ``below``; None if one fits nowhere."""
    heap = [(load, number) for number, load in enumerate(below.tolist())]  # (work + below, bin)
    heapq.heapify(heap)
    free_slots = [room[0]] * len(heap)
    free_patches = [room[1]] * len(heap)
    owner = np.empty(len(items), np.int64)
    for work, slots, patches, position in items:
        full = []  # bins with less work, but without room for this sequence
        while heap:
            load, number = heapq.heappop(heap)
            if free_slots[number] >= slots and free_patches[number] >= patches:
                break
            full.append((load, number))
        else:
            return None

        owner[position] = number
        free_slots[number] -= slots
        free_patches[number] -= patches
        heapq.heappush(heap, (load + work, number))
        for entry in full:
            heapq.heappush(heap, entry)
    return owner


def assign_bins(totals: FloatArray, dp: int) -> IntArray:
    """Assign bins to ranks and microbatches, so that bins of similar work run at the same time."""
    microsteps = np.argsort(-totals, kind="stable").reshape(-1, dp)  # the bins of each, the heaviest first
    load = np.zeros(dp)  # work of each rank so far
    assigned = np.empty((dp, len(microsteps)), np.int64)
    for step, bins in enumerate(microsteps):
        ranks = np.argsort(load, kind="stable")  # the rank with the least work gets the heaviest bin
        assigned[ranks, step] = bins
        load[ranks] += totals[bins]
    return assigned.reshape(-1)


# The level of a microstep is the work to which its bins are filled. These levels are tried, in units of the
# mean work left for a bin. A higher level leaves fewer and shorter sequences to the last microstep.
_LEVELS = (1.0, 1.04, 1.08, 1.12, 1.16, 1.2, 1.24, 1.32)
_HIGHEST = 1.2  # The last microstep is filled to at most 1.2 times its lowest possible level.
_PRECISION = 0.003  # The level of the last microstep is found to 0.3 %.
_LEAST_GAIN = 1e-9  # A smaller gain, in units of a microstep's heaviest bin, is rounding.
_EXCHANGES = 100  # At most 100 exchanges, of about 25 us each, improve the best plan.

_Item = tuple[float, int, int, int]  # (work, slots, patches, position), sorted by falling work
_Bin = tuple[float, int, int, int]  # (work left, slots left, patches left, index of the bin)


def _items(step: Problem) -> list[_Item]:
    """Return the sequences as Python tuples, because loops read those faster than arrays."""
    order = np.argsort(-step.work, kind="stable")
    columns = (step.work[order], step.lengths[order], step.patches[order], order)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def fill_microsteps(step: Problem, num_microbatches: int, *, enough: float) -> IntArray | None:
    """Fill microsteps by best fit in work, the heaviest first; None if no level holds all sequences."""
    items = _items(step)
    room = (step.slots.usable, step.slots.patches)
    search = _Search(room=room, dp=step.dp, microsteps=num_microbatches)
    total = sum(work for work, _, _, _ in items)
    empty = _Partial(owner=[0] * len(items), left=items, total=total, filled=0, waits=0.0)
    start = search.fill_forced(empty)

    best: IntArray | None = None
    least = np.inf  # the duration of the best plan
    below = np.inf  # its duration by the search's own sums, which a better plan must undercut
    for level in _LEVELS:
        plan = search.fill_level(start, level, below=below)
        if plan is None:
            continue
        below = min(below, plan.waits)
        owner = np.array(plan.owner, dtype=np.int64)
        waits = step.waits(owner, step.dp * num_microbatches)
        if waits < least:
            best = owner
            least = waits
        only_last_left = start.filled == num_microbatches - 1  # its level is found by bisection, not tried
        if least <= enough or only_last_left:
            break

    if best is not None and least > enough:
        exchange(step, best, num_microbatches)
    return best


def exchange(step: Problem, owner: IntArray, num_microbatches: int) -> None:
    """Exchange sequences of the heaviest bins for sequences with less work, or for none; update ``owner``."""
    # Each exchange takes work from the heaviest bin of a microstep; the one furthest above its microstep's
    # mean comes first. The best exchange leaves both its bins furthest below the previous maxima.
    exchanges = _Exchanges(step, owner, num_microbatches)
    open_microsteps = np.ones(num_microbatches, bool)  # those for which an exchange may still help
    changed = False  # whether any exchange was made since all microsteps were open

    for _ in range(_EXCHANGES):
        excess = np.where(open_microsteps, exchanges.heaviest - exchanges.mean, -1.0)
        microstep = int(excess.argmax())
        if exchanges.improve(microstep):
            changed = True
            continue
        open_microsteps[microstep] = False
        if open_microsteps.any():
            continue

        if not changed:
            break
        open_microsteps[:] = True  # try all again, because later exchanges may have made room
        changed = False

    owner[:] = exchanges.place[: len(owner)]


class _Exchanges:
    """The bins of a plan and what they hold, while sequences are exchanged between them.

    Legend: B bins, S sequences, M microsteps, N bounds (slots, and patches if they are bounded).
    """

    def __init__(self, step: Problem, owner: IntArray, num_microbatches: int) -> None:
        bins = step.dp * num_microbatches
        self.step = step
        self.loads = step.bin_work(owner, bins)  # float64 ``[B]``, work of each bin
        self.by_microstep = self.loads.reshape(num_microbatches, step.dp)  # a view: follows ``loads``
        self.heaviest = self.by_microstep.max(1)  # float64 ``[M]``
        self.mean = self.by_microstep.mean(1)  # float64 ``[M]``
        self.bounds = step.bounds

        # For each bound, int64 ``[B]``: what each bin holds.
        self.held = [
            np.bincount(owner, weights=sizes, minlength=bins).astype(np.int64) for sizes, _ in self.bounds
        ]

        # A bin gives one of its sequences in exchange, or nothing. So these arrays, ``[S + B]``, end with an
        # entry of no work and no size for each bin.
        self.place = np.append(owner, np.arange(bins))
        self.work = np.append(step.work, np.zeros(bins))
        self.sizes = [np.append(sizes, np.zeros(bins, np.int64)) for sizes, _ in self.bounds]

    def improve(self, microstep: int) -> bool:
        """Make the best exchange for the heaviest bin of a microstep; return False if none gains work."""
        dp = self.step.dp
        sequences = len(self.step.work)
        heavy = microstep * dp + int(self.by_microstep[microstep].argmax())
        members = np.flatnonzero(self.place[:sequences] == heavy)
        if not len(members):
            return False

        # ``[members, S + B]``: what would move from the heavy bin to the other one, less what comes back.
        moved_work = self.step.work[members][:, None] - self.work
        moved_sizes = [
            sizes[members][:, None] - others
            for (sizes, _), others in zip(self.bounds, self.sizes, strict=True)
        ]
        fits = moved_work > 0
        for (_, most), held, moved in zip(self.bounds, self.held, moved_sizes, strict=True):
            fits &= (held[self.place] + moved <= most) & (held[heavy] - moved <= most)
        # By how much the two bins would exceed the heaviest bins of their microsteps; the larger excess.
        heavy_excess = (self.loads[heavy] - self.heaviest[microstep]) - moved_work
        other_excess = (self.loads - np.repeat(self.heaviest, dp))[self.place] + moved_work
        excess = np.maximum(heavy_excess, other_excess)
        excess[~fits | (self.place == heavy)] = np.inf

        member, other = divmod(int(excess.argmin()), len(self.place))
        if excess[member, other] >= -_LEAST_GAIN * self.heaviest[microstep]:
            return False

        target = int(self.place[other])
        signs = np.array([-1, 1])  # the heavy bin loses what the target gains
        self.loads[[heavy, target]] += signs * moved_work[member, other]
        for held, moved in zip(self.held, moved_sizes, strict=True):
            held[[heavy, target]] += signs * moved[member, other]
        self.place[members[member]] = target
        if other < sequences:  # else the target gives nothing
            self.place[other] = heavy
        for number in {microstep, target // dp}:
            self.heaviest[number] = self.by_microstep[number].max()
            self.mean[number] = self.by_microstep[number].mean()
        return True


def waiting(totals: FloatArray, dp: int) -> float:
    """Return the duration of a step in units of work: the sum over microsteps of the heaviest bin."""
    return float(np.sort(totals)[::-1][::dp].sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Partial:
    """A plan whose first microsteps are filled."""

    owner: list[int]  # the bin of each position
    left: list[_Item]  # items in no bin yet
    total: float  # work of the items in no bin yet
    filled: int  # number of filled microsteps
    waits: float  # the sum of the heaviest bins of the filled microsteps


@dataclass(frozen=True, kw_only=True, slots=True)
class _Search:
    """Fills microsteps one after another; each method returns a new plan and keeps the old one."""

    room: tuple[int, int]  # slots and patches of a bin
    dp: int  # data-parallel ranks: bins of a microstep
    microsteps: int

    def fill_forced(self, plan: _Partial) -> _Partial:
        """Fill the first microsteps, whose largest sequence is above every level that is tried."""
        last = self.microsteps - 1
        while plan.filled < last and plan.left and plan.left[0][0] >= self._mean(plan) * _LEVELS[-1]:
            plan = self._next(plan, plan.left[0][0])
        return plan

    def fill_level(self, plan: _Partial, level: float, *, below: float) -> _Partial | None:
        """Fill the other microsteps to ``level`` times their mean; None if not all fit within ``below``."""
        while plan.filled < self.microsteps - 1 and plan.left:
            largest = plan.left[0][0]
            plan = self._next(plan, max(largest, self._mean(plan) * level))
        if not plan.left:
            return plan
        return self._last(plan, below - plan.waits)

    def _mean(self, plan: _Partial) -> float:
        """Return the mean work of the bins of the microsteps that are not filled yet."""
        return plan.total / ((self.microsteps - plan.filled) * self.dp)

    def _next(self, plan: _Partial, level: float) -> _Partial:
        """Fill the next microstep to a level."""
        owner = plan.owner.copy()
        first = plan.filled * self.dp
        left, heaviest, placed = _fill(plan.left, level, self.room, owner, range(first, first + self.dp))
        return _Partial(
            owner=owner,
            left=left,
            total=plan.total - placed,
            filled=plan.filled + 1,
            waits=plan.waits + heaviest,
        )

    def _last(self, plan: _Partial, below: float) -> _Partial | None:
        """Find by bisection the lowest level at which the last microstep holds the remaining sequences."""
        low = max(plan.left[0][0], self._mean(plan))
        high = min(low * _HIGHEST, below)
        best = self._next(plan, high)
        if best.left:
            return None
        while high - low > low * _PRECISION:
            middle = (low + high) / 2
            trial = self._next(plan, middle)
            if trial.left:
                low = middle
            else:
                best = trial
                high = middle
        return best if best.waits < plan.waits + below else None


def _fill(
    items: list[_Item], level: float, room_of_bin: tuple[int, int], owner: list[int], numbers: range
) -> tuple[list[_Item], float, float]:
    """Put items, the most work first, in the bins that they fill closest to the level; update ``owner``.

    Return the items left, the work of the fullest bin, and the work of all items that were placed.
    """
    level *= 1 + 1e-12  # sums are rounded
    least = items[-1][0]
    bins: list[_Bin] = []  # those with items and room for more, by rising room
    left: list[_Item] = []
    unopened = list(reversed(numbers))
    tightest = level  # the least room of any bin
    placed = 0.0
    next_item = 0
    while next_item < len(items):
        work, slots, patches, position = items[next_item]
        # The bin with the least room for the work, among those with enough slots and patches.
        tightest_fit = bisect_left(bins, (work,))
        while tightest_fit < len(bins) and (bins[tightest_fit][1] < slots or bins[tightest_fit][2] < patches):
            tightest_fit += 1

        if tightest_fit < len(bins):
            room, free_slots, free_patches, number = bins.pop(tightest_fit)
        elif unopened:
            number = unopened.pop()
            room = level
            free_slots, free_patches = room_of_bin
        else:  # skip to the first item that the bin with the most room could take
            roomiest = bins[-1][0] if bins else 0.0
            fitting = bisect_left(items, -roomiest, lo=next_item, key=_falling_work)
            fitting = max(next_item + 1, fitting)
            left += items[next_item:fitting]
            next_item = fitting
            continue

        owner[position] = number
        room -= work
        placed += work
        tightest = min(tightest, room)
        if room >= least:
            insort(bins, (room, free_slots - slots, free_patches - patches, number))
        next_item += 1
    return left, level - tightest, placed


def _falling_work(item: _Item) -> float:
    """Return a key by which the items, which are sorted by falling work, rise."""
    return -item[0]
