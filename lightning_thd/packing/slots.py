"""A capacity and an alignment -> what a pack offers, and best-fit packing of padded lengths into it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_thd.alignment import Alignment
from lightning_thd.packing.bins import Packing, pack_lengths
from lightning_thd.packing.lengths import check_capacity

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """What a pack offers: usable slots, of which each sequence takes a multiple.

    Attributes:
        usable: slots of a pack, a multiple of ``multiple``.
        multiple: slots of a sequence are rounded up to this.
    """

    usable: int
    multiple: int

    def padded(self, lengths: IntArray) -> IntArray:
        """Slots that sequences of these lengths take."""
        return -(-lengths // self.multiple) * self.multiple


def best_fit(padded: IntArray, slots: Slots) -> Packing:
    """Pack by best-fit decreasing; a length above what is usable gets a pack of its own.

    Args:
        padded: int64 ``[S]``, multiples of ``slots.multiple``: divided by it, fewer distinct lengths are
            left.
        slots: what a pack offers.
    """
    fits = padded <= slots.usable
    if fits.all():
        return pack_lengths(padded // slots.multiple, slots.usable // slots.multiple)
    inside, alone = np.flatnonzero(fits), np.flatnonzero(~fits)
    packs = pack_lengths(padded[inside] // slots.multiple, slots.usable // slots.multiple)
    ends = packs.offsets[-1] + np.arange(1, len(alone) + 1)
    return Packing(
        indices=np.concatenate([inside[packs.indices], alone]), offsets=np.concatenate([packs.offsets, ends])
    )


def make_slots(capacity: int, align: Alignment | None) -> Slots:
    """Work out what of a capacity an alignment leaves usable.

    Args:
        capacity: slots of a pack.
        align: multiples of the padded lengths and of their total; None asks for nothing.

    Returns:
        The slots: ``capacity=100`` with multiples of 8 and 32 leaves 96 slots, in steps of 8.

    Raises:
        ValueError: when the alignment leaves no slot.
    """
    check_capacity(capacity)
    if align is None:
        return Slots(usable=int(capacity), multiple=1)
    usable = int(capacity) // align.total_multiple * align.total_multiple
    if not usable:
        raise ValueError(
            f"capacity={capacity} is below total_multiple={align.total_multiple} of {align}: no pack can be "
            f"aligned. Raise capacity to {align.total_multiple} or more."
        )
    return Slots(usable=usable, multiple=align.sequence_multiple)
