"""A capacity and an alignment -> the usable slots of a pack."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_thd._checks import instance, whole_number
from lightning_thd.alignment import Alignment

IntArray = npt.NDArray[np.int64]

MOST_SLOTS = 2**31 - 1  # cu_seqlens are int32
MOST_RANKS = 2**20  # a plan holds an entry for each rank
UNBOUNDED = 2**62  # most patches of a pack if no bound is set


def check_capacity(capacity: object) -> None:
    """Raise unless the capacity is a whole number from 1 to the largest int32 (cu_seqlens are int32)."""
    advice = "It is the number of slots of a pack, for example 8192."
    whole_number(capacity, "capacity", least=1, most=MOST_SLOTS, advice=advice)


def check_patches(max_patches: int | None) -> int:
    """Return the most image patches of a pack, ``UNBOUNDED`` for None."""
    if max_patches is None:
        return UNBOUNDED
    advice = "It is the most image patches of a pack; None sets no bound."
    return whole_number(max_patches, "max_patches", least=1, most=UNBOUNDED, advice=advice)


def too_many_patches(index: int, patches: int, most: int) -> str:
    """Return the message for a sequence whose images are above ``max_patches``."""
    return (
        f"Sequence {index} has {patches} image patches but max_patches={most}. Raise max_patches, make the "
        "images smaller (max_pixels of the processor), or set oversize='drop' or 'own_pack'."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """The usable slots of a pack, and the multiple to which each sequence is padded."""

    usable: int  # slots of a pack, a multiple of ``multiple``
    multiple: int  # slots of a sequence are rounded up to a multiple of this
    patches: int = UNBOUNDED  # most image patches of a pack

    @property
    def longest(self) -> int:
        """Return the most real tokens of a sequence that fits a pack."""
        return self.usable

    def padded(self, lengths: IntArray) -> IntArray:
        """Return the slots that sequences of these lengths take."""
        return -(-lengths // self.multiple) * self.multiple


def make_slots(capacity: int, align: Alignment | None, max_patches: int | None = None) -> Slots:
    """Return the usable slots of a capacity: 100 slots with multiples 8 and 32 have 96 usable slots."""
    check_capacity(capacity)
    patches = check_patches(max_patches)
    if align is None:
        return Slots(usable=int(capacity), multiple=1, patches=patches)

    instance(align, "align", Alignment, advice="Pass Alignment(sequence_multiple=..., total_multiple=...).")
    usable = int(capacity) // align.total_multiple * align.total_multiple
    if not usable:
        raise ValueError(
            f"capacity={capacity} is below total_multiple={align.total_multiple} of {align}. Raise capacity."
        )
    return Slots(usable=usable, multiple=align.sequence_multiple, patches=patches)
