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

# (first, packs, each, held): `packs` packs, from index `first` on, hold `held` sequences and get `each` more.
_Placement = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packing:
    """Which sequences share a pack: pack ``i`` holds ``indices[offsets[i]:offsets[i + 1]]``."""

    indices: IntArray  # int64 ``[S]``, positions in the lengths that were packed, each exactly once
    offsets: IntArray  # int64 ``[P + 1]``, first entry 0, last entry S

    def __post_init__(self) -> None:
        indices, offsets = host_ints(self.indices, "indices"), host_ints(self.offsets, "offsets")
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(indices) or (np.diff(offsets) < 0).any():
            raise ValueError(
                f"Offsets {offsets[:8].tolist()} must begin with 0, never fall, and end with {len(indices)}."
            )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, pack: int) -> IntArray:
        pack = range(len(self))[pack]
        return self.indices[self.offsets[pack] : self.offsets[pack + 1]]

    def __iter__(self) -> Iterator[IntArray]:
        return (self[pack] for pack in range(len(self)))

    def totals(self, values: npt.ArrayLike) -> IntArray:
        """Return the sum of ``values`` (one per sequence) over every pack."""
        running = np.concatenate([[0], np.cumsum(self._in_order(values, "values"))])
        return np.asarray(running[self.offsets[1:]] - running[self.offsets[:-1]], dtype=np.int64)

    def fill(self, lengths: npt.ArrayLike, capacity: int) -> float:
        """Return real tokens divided by slots, for packs of ``capacity`` slots; 1.0 means no padding."""
        check_capacity(capacity)
        real = self._in_order(lengths, "lengths").sum()
        return float(real / (len(self) * capacity)) if len(self) else 1.0

    def _in_order(self, values: npt.ArrayLike, name: str) -> IntArray:
        found = host_ints(values, name)
        if len(found) != len(self.indices):
            raise ValueError(
                f"{name} has {len(found)} numbers for {len(self.indices)} sequences. Pass one for each."
            )
        return found[self.indices]


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
    most = min(max_sequences or len(values), len(values))
    if algorithm == "next_fit":
        return _next_fit(values, capacity, most)
    keys = values.max() - values  # 16-bit keys take numpy's linear radix sort
    order = np.argsort(keys.astype(np.uint16) if keys.max() < 1 << 16 else keys, kind="stable")
    sizes, counts = _histogram(values[order])
    placements, num_packs = _best_fit(sizes, counts, capacity, most)
    return _gather(placements, num_packs, order)


def best_fit(padded: IntArray, slots: Slots, patches: IntArray | None = None) -> Packing:
    """Pack by best-fit decreasing; a sequence that is too large for a pack gets a pack of its own."""
    if patches is not None and slots.patches < UNBOUNDED:
        # Sorted, so that the number of packs does not depend on the order of the sequences.
        order = np.lexsort((patches, padded))
        padded, patches = padded[order], patches[order]
        packs = best_fit(padded, replace(slots, patches=UNBOUNDED))
        wide = (packs.totals(patches) > slots.patches) & (np.diff(packs.offsets) > 1)
        packs = _fit_both(padded, patches, slots) if wide.any() else packs
        return replace(packs, indices=order[packs.indices])
    fits = padded <= slots.usable
    if fits.all():
        return pack_lengths(padded // slots.multiple, slots.usable // slots.multiple)
    inside, over = np.flatnonzero(fits), np.flatnonzero(~fits)
    packs = pack_lengths(padded[inside] // slots.multiple, slots.usable // slots.multiple)
    ends = packs.offsets[-1] + np.arange(1, len(over) + 1)
    return Packing(
        indices=np.concatenate([inside[packs.indices], over]), offsets=np.concatenate([packs.offsets, ends])
    )


def _fit_both(padded: IntArray, patches: IntArray, slots: Slots) -> Packing:
    """Pack by best fit in slots and patches; sequences that take most of a pack in either come first."""
    slot, patch = 1 / slots.usable, 1 / slots.patches  # shares of a pack that one slot and one patch take
    order = np.argsort(-np.maximum(padded * slot, patches * patch), kind="stable")
    free_slots, free_patches = np.empty_like(padded), np.empty_like(padded)  # for each pack
    share = np.empty(len(padded))  # the free share of slots plus the free share of patches
    owner, count = np.empty(len(padded), np.int64), 0
    for i, size, seen in zip(order.tolist(), padded[order].tolist(), patches[order].tolist(), strict=True):
        fits = (free_slots[:count] >= size) & (free_patches[:count] >= seen)
        pack = int(np.where(fits, share[:count], np.inf).argmin()) if count else 0
        if pack == count or not fits[pack]:
            pack, count = count, count + 1
            free_slots[pack], free_patches[pack] = slots.usable, slots.patches
        free_slots[pack] -= size
        free_patches[pack] -= seen
        share[pack] = free_slots[pack] * slot + free_patches[pack] * patch
        owner[i] = pack
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
    return _best_fit(sizes, counts, capacity, len(lengths))[1]


def _histogram(descending: IntArray) -> tuple[list[int], list[int]]:
    """Count equal neighbours: ``[5, 5, 2]`` becomes ``([5, 2], [2, 1])``."""
    starts = np.flatnonzero(np.concatenate([[True], descending[1:] != descending[:-1]]))
    counts = np.diff(starts, append=len(descending))
    return descending[starts].tolist(), counts.tolist()


def _best_fit(sizes: list[int], counts: list[int], capacity: int, limit: int) -> tuple[list[_Placement], int]:
    """Place sizes, largest first, in packs with the least room that holds them, at most ``limit`` in each."""
    placements: list[_Placement] = []
    # Packs that can hold the current size are ready. The others wait for a smaller size.
    ready: list[tuple[int, int, int, int]] = []  # (room, held, first pack, packs)
    waiting: list[tuple[int, int, int, int]] = []  # (-room, -held, first pack, packs)
    num_packs, smallest = 0, sizes[-1]
    for size, count in zip(sizes, counts, strict=True):
        while waiting and -waiting[0][0] >= size:
            room, held, first, packs = heapq.heappop(waiting)
            ready.append((-room, -held, first, packs))
        while count:
            if ready:
                room, held, first, packs = ready.pop()
                each = min(room // size, limit - held)
            else:
                room, held, first = capacity, 0, num_packs
                each = min(room // size, limit)
                packs = -(-count // each)
                num_packs += packs
            filled = min(packs, count // each)
            if filled:
                placements.append((first, filled, each, held))
                count -= filled * each
                left = room - each * size
                if left >= smallest and held + each < limit:
                    heapq.heappush(waiting, (-left, -held - each, first, filled))
            if filled == packs:
                continue
            begun = 1 if count else 0
            if filled + begun < packs:
                ready.append((room, held, first + filled + begun, packs - filled - begun))
            if begun:
                placements.append((first + filled, 1, count, held))
                ready.append((room - count * size, held + count, first + filled, 1))
                count = 0
    return placements, num_packs


def _gather(placements: list[_Placement], num_packs: int, order: IntArray) -> Packing:
    """Convert placements to a Packing; each placement takes the next sequences of ``order``."""
    first, packs, each, held = np.array(placements, dtype=np.int64).T
    total = packs * each
    start = np.cumsum(total) - total
    within = np.arange(len(order)) - np.repeat(start, total)
    per_pack = np.repeat(each, total)
    step = within // per_pack
    pack = np.repeat(first, total) + step
    slot = np.repeat(held, total) + within - step * per_pack
    offsets = np.zeros(num_packs + 1, np.int64)
    np.cumsum(np.bincount(pack, minlength=num_packs), out=offsets[1:])
    indices = np.empty(len(order), np.int64)
    indices[offsets[pack] + slot] = order
    return Packing(indices=indices, offsets=offsets)


def _next_fit(values: IntArray, capacity: int, most: int) -> Packing:
    """Pack in the given order, closing a pack as soon as the next sequence does not fit."""
    ends = np.cumsum(values)
    following = np.searchsorted(ends, ends - values + capacity, side="right")
    jump = np.minimum(following, np.arange(len(values)) + most).tolist()
    offsets = [0]
    while offsets[-1] < len(values):
        offsets.append(jump[offsets[-1]])
    return Packing(indices=np.arange(len(values)), offsets=np.array(offsets, dtype=np.int64))
