"""Sequence lengths -> packs of at most ``capacity`` slots, as two flat index arrays.

Best-fit decreasing loops over the distinct lengths, and fills packs with equal contents together. It makes as
many packs as if it placed the sequences one by one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from lightning_thd._checks import choice, host_ints, whole_number
from lightning_thd.packing.lengths import UNBOUNDED, Slots, check_capacity

Algorithm = Literal["bfd", "next_fit"]
IntArray = npt.NDArray[np.int64]

# (first, packs, per_pack, num_inside): `packs` packs, from index `first` on, hold `num_inside` sequences each
# and get `per_pack` more.
_Placement = tuple[int, int, int, int]

_RADIX_KEYS = 1 << 16  # numpy sorts keys of 16 bits by a linear radix sort


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packing:
    """Which sequences share a pack: pack ``i`` holds ``indices[offsets[i]:offsets[i + 1]]``."""

    indices: IntArray  # int64 ``[S]``, positions in the lengths that were packed, each exactly once
    offsets: IntArray  # int64 ``[P + 1]``, first entry 0, last entry S

    def __post_init__(self) -> None:
        indices = host_ints(self.indices, "indices")
        offsets = host_ints(self.offsets, "offsets")
        spans_all = len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == len(indices)
        if not spans_all or (np.diff(offsets) < 0).any():
            raise ValueError(
                f"Offsets {offsets[:8].tolist()} must begin with 0, never fall, and end with {len(indices)}."
            )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, pack: int) -> IntArray:
        pack = range(len(self))[pack]  # counts negative numbers from the end, and raises IndexError
        return self.indices[self.offsets[pack] : self.offsets[pack + 1]]

    def __iter__(self) -> Iterator[IntArray]:
        return (self[pack] for pack in range(len(self)))

    def totals(self, values: npt.ArrayLike) -> IntArray:
        """Return the sum of ``values`` (one per sequence) over every pack."""
        # Differences of running sums, because np.add.reduceat gives an empty pack the value of its neighbour.
        running = np.concatenate([[0], np.cumsum(self._in_order(values, "values"))])
        return np.asarray(running[self.offsets[1:]] - running[self.offsets[:-1]], dtype=np.int64)

    def fill(self, lengths: npt.ArrayLike, capacity: int) -> float:
        """Return real tokens divided by slots, for packs of ``capacity`` slots; 1.0 means no padding."""
        check_capacity(capacity)
        real_tokens = self._in_order(lengths, "lengths").sum()
        if not len(self):
            return 1.0
        return float(real_tokens / (len(self) * capacity))

    def _in_order(self, values: npt.ArrayLike, name: str) -> IntArray:
        """Return one value per sequence in the order of ``indices``: pack after pack."""
        numbers = host_ints(values, name)
        if len(numbers) != len(self.indices):
            raise ValueError(
                f"{name} has {len(numbers)} numbers for {len(self.indices)} sequences. Pass one for each."
            )
        return numbers[self.indices]


def pack_lengths(
    lengths: npt.ArrayLike | Sequence[int],
    capacity: int,
    *,
    algorithm: Algorithm = "bfd",
    max_sequences: int | None = None,
) -> Packing:
    """Lay sequences end to end in as few packs of ``capacity`` slots as the algorithm finds.

    Args:
        lengths: positive ints ``[S]``, tokens of each sequence.
        capacity: slots of a pack.
        algorithm: ``"bfd"`` (best-fit decreasing) leaves fewer slots empty; ``"next_fit"`` keeps the
            order given.
        max_sequences: most sequences in one pack; None sets no bound.

    Returns:
        The packs. ``pack_lengths([5, 3, 4, 4], 8)`` has the packs ``[0, 1]`` and ``[2, 3]``.
    """
    check_capacity(capacity)
    values = host_ints(lengths, "lengths", least=1, advice="Leave empty sequences out.")
    if max_sequences is not None:
        whole_number(max_sequences, "max_sequences", least=1, most=2**255, advice="None sets no bound.")
    choice(algorithm, "algorithm", *get_args(Algorithm))
    if not len(values):
        return Packing(indices=np.empty(0, np.int64), offsets=np.zeros(1, np.int64))

    longest = int(values.argmax())
    if values[longest] > capacity:
        raise ValueError(
            f"Sequence {longest} has {values[longest]} tokens but capacity={capacity}. Raise capacity."
        )
    # A bound above the number of sequences is no bound; this one also fits int64.
    most = len(values) if max_sequences is None else min(max_sequences, len(values))
    if algorithm == "next_fit":
        return _next_fit(values, capacity, most)

    order = _longest_first(values)
    sizes, counts = _histogram(values[order])
    placements, num_packs = _best_fit(sizes, counts, capacity, most)
    return _gather(placements, num_packs, order)


def _longest_first(lengths: IntArray) -> IntArray:
    """Return the positions of lengths by falling length; equal ones keep their order."""
    keys = lengths.max() - lengths
    if keys.max() < _RADIX_KEYS:
        return np.argsort(keys.astype(np.uint16), kind="stable")
    return np.argsort(keys, kind="stable")


def best_fit(padded: IntArray, slots: Slots, patches: IntArray | None = None) -> Packing:
    """Pack by best-fit decreasing; a sequence that is too large for a pack gets a pack of its own."""
    if patches is not None and slots.patches < UNBOUNDED:
        return _best_fit_patches(padded, slots, patches)

    # In units of the multiple there are fewer distinct lengths, over which best fit loops.
    capacity = slots.usable // slots.multiple
    fits = padded <= slots.usable
    if fits.all():
        return pack_lengths(padded // slots.multiple, capacity)

    inside = np.flatnonzero(fits)
    too_large = np.flatnonzero(~fits)
    packs = pack_lengths(padded[inside] // slots.multiple, capacity)
    ends = packs.offsets[-1] + np.arange(1, len(too_large) + 1)
    return Packing(
        indices=np.concatenate([inside[packs.indices], too_large]),
        offsets=np.concatenate([packs.offsets, ends]),
    )


def _best_fit_patches(padded: IntArray, slots: Slots, patches: IntArray) -> Packing:
    """Pack by slots only; if a pack then has too many patches, pack again by slots and patches."""
    # Sorted, so that the number of packs does not depend on the order of the sequences.
    order = np.lexsort((patches, padded))
    padded = padded[order]
    patches = patches[order]

    packs = best_fit(padded, replace(slots, patches=UNBOUNDED))
    # A sequence that is too large by itself has a pack of its own, whatever its patches.
    too_many = (packs.totals(patches) > slots.patches) & (np.diff(packs.offsets) > 1)
    if too_many.any():
        packs = _fit_both(padded, patches, slots)
    return replace(packs, indices=order[packs.indices])


def _fit_both(padded: IntArray, patches: IntArray, slots: Slots) -> Packing:
    """Pack by best fit in slots and patches; sequences that take most of a pack in either come first."""
    slot_share = 1 / slots.usable  # share of a pack that one slot takes
    patch_share = 1 / slots.patches
    order = np.argsort(-np.maximum(padded * slot_share, patches * patch_share), kind="stable")

    # One entry for each pack; there are at most as many packs as sequences, of which ``count`` are open.
    free_slots = np.empty_like(padded)
    free_patches = np.empty_like(padded)
    free_share = np.empty(len(padded))  # the free share of slots plus the free share of patches
    count = 0
    owner = np.empty(len(padded), np.int64)  # the pack of each sequence
    sizes = zip(order.tolist(), padded[order].tolist(), patches[order].tolist(), strict=True)
    for sequence, num_slots, num_patches in sizes:
        fits = (free_slots[:count] >= num_slots) & (free_patches[:count] >= num_patches)
        if fits.any():
            pack = int(np.where(fits, free_share[:count], np.inf).argmin())
        else:
            pack = count
            count += 1
            free_slots[pack] = slots.usable
            free_patches[pack] = slots.patches
        # Both may fall below 0 in the pack of a sequence that is too large: no other sequence fits there.
        free_slots[pack] -= num_slots
        free_patches[pack] -= num_patches
        free_share[pack] = free_slots[pack] * slot_share + free_patches[pack] * patch_share
        owner[sequence] = pack

    members = np.lexsort((-padded, owner))
    sizes_of_packs = np.bincount(owner, minlength=count)
    return Packing(indices=members, offsets=np.concatenate([[0], np.cumsum(sizes_of_packs)]))


def regrouped(offsets: IntArray, order: IntArray) -> tuple[IntArray, IntArray]:
    """Reorder groups; return indices and offsets: ``([0, 2, 3], [1, 0])`` gives ``[2, 0, 1], [0, 1, 3]``."""
    sizes = np.diff(offsets)[order]
    ends = np.concatenate([[0], np.cumsum(sizes)])
    within = np.arange(ends[-1]) - np.repeat(ends[:-1], sizes)
    return np.repeat(offsets[:-1][order], sizes) + within, ends


def count_packs(lengths: IntArray, capacity: int) -> int:
    """Count the packs of :func:`pack_lengths` by best-fit decreasing, without laying them out."""
    if not len(lengths):
        return 0
    sizes, counts = _histogram(np.sort(lengths)[::-1])
    _, num_packs = _best_fit(sizes, counts, capacity, len(lengths))
    return num_packs


def _histogram(descending: IntArray) -> tuple[list[int], list[int]]:
    """Count equal neighbours: ``[5, 5, 2]`` becomes ``([5, 2], [2, 1])``."""
    starts = np.flatnonzero(np.concatenate([[True], descending[1:] != descending[:-1]]))
    counts = np.diff(starts, append=len(descending))
    return descending[starts].tolist(), counts.tolist()


def _best_fit(sizes: list[int], counts: list[int], capacity: int, limit: int) -> tuple[list[_Placement], int]:
    """Place sizes, largest first, in packs with the least room that holds them, at most ``limit`` in each.

    Return the placements and the number of packs. ``sizes`` fall, and ``counts`` says how often each occurs.
    """
    placements: list[_Placement] = []
    # Packs with equal contents form one entry: neighbours from index ``first`` on. Entries that can hold the
    # current size are ready, the one with the least room last. The others wait for a smaller size in a heap,
    # whose first entry has the most room: it becomes ready first.
    ready: list[tuple[int, int, int, int]] = []  # (room, num_inside, first, packs)
    waiting: list[tuple[int, int, int, int]] = []  # (-room, -num_inside, first, packs)
    num_packs = 0
    smallest = sizes[-1]
    for size, count in zip(sizes, counts, strict=True):
        while waiting and -waiting[0][0] >= size:
            room, num_inside, first, packs = heapq.heappop(waiting)
            ready.append((-room, -num_inside, first, packs))

        while count:
            if ready:
                room, num_inside, first, packs = ready.pop()
                per_pack = min(room // size, limit - num_inside)
            else:  # open as many packs as the remaining sequences of this size need
                room = capacity
                num_inside = 0
                first = num_packs
                per_pack = min(room // size, limit)
                packs = -(-count // per_pack)
                num_packs += packs

            # Packs that take as many sequences of this size as they can hold.
            filled = min(packs, count // per_pack)
            if filled:
                placements.append((first, filled, per_pack, num_inside))
                count -= filled * per_pack
                left = room - per_pack * size
                if left >= smallest and num_inside + per_pack < limit:
                    heapq.heappush(waiting, (-left, -num_inside - per_pack, first, filled))
            if filled == packs:
                continue

            # The sequences that are left are too few to fill one more pack: they begin it. It has less room
            # than the untouched packs behind it, so it is ready after them.
            begun = 1 if count else 0
            if filled + begun < packs:
                ready.append((room, num_inside, first + filled + begun, packs - filled - begun))
            if begun:
                placements.append((first + filled, 1, count, num_inside))
                ready.append((room - count * size, num_inside + count, first + filled, 1))
                count = 0
    return placements, num_packs


def _gather(placements: list[_Placement], num_packs: int, order: IntArray) -> Packing:
    """Convert placements to a Packing; each placement takes the next sequences of ``order``."""
    first, packs, per_pack, num_inside = np.array(placements, dtype=np.int64).T
    total = packs * per_pack  # sequences of each placement
    start = np.cumsum(total) - total

    # For each sequence of ``order``: its number in its placement, its pack, and its place in that pack.
    number = np.arange(len(order)) - np.repeat(start, total)
    per_pack_of_each = np.repeat(per_pack, total)
    pack_number = number // per_pack_of_each
    pack = np.repeat(first, total) + pack_number
    place = np.repeat(num_inside, total) + number - pack_number * per_pack_of_each

    offsets = np.zeros(num_packs + 1, np.int64)
    np.cumsum(np.bincount(pack, minlength=num_packs), out=offsets[1:])
    indices = np.empty(len(order), np.int64)
    indices[offsets[pack] + place] = order
    return Packing(indices=indices, offsets=offsets)


def _next_fit(values: IntArray, capacity: int, most: int) -> Packing:
    """Pack in the given order, closing a pack as soon as the next sequence does not fit."""
    # If a pack begins with sequence i, the next pack begins with sequence ``next_start[i]``.
    ends = np.cumsum(values)
    beyond_capacity = np.searchsorted(ends, ends - values + capacity, side="right")
    next_start = np.minimum(beyond_capacity, np.arange(len(values)) + most).tolist()

    offsets = [0]
    while offsets[-1] < len(values):
        offsets.append(next_start[offsets[-1]])
    return Packing(indices=np.arange(len(values)), offsets=np.array(offsets, dtype=np.int64))
