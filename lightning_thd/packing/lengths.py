"""What a user passes as lengths, capacity and alignment -> checked integers, and the slots of a pack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_thd.alignment import Alignment

IntArray = npt.NDArray[np.int64]


def as_lengths(
    lengths: npt.ArrayLike | Sequence[int], *, name: str = "lengths", least: int = 1
) -> npt.NDArray[np.int64]:
    """Check a one-dimensional collection of ints and return it as int64.

    Args:
        lengths: ints ``[S]``: a list, an array of any integer type, a tensor on the CPU.
        name: what to call it in the error.
        least: smallest value allowed.

    Returns:
        int64 ``[S]``. ``as_lengths((3, 4))`` becomes ``array([3, 4])``.

    Raises:
        ValueError: when it is not one-dimensional, not of integers, or holds a value below ``least``.
    """
    values = np.asarray(lengths)
    if values.ndim != 1:
        raise ValueError(f"{name} has the shape {values.shape}. Pass one integer a sequence, shape [S].")
    if not values.size:
        return np.empty(0, np.int64)
    if values.dtype.kind not in "iu":
        raise ValueError(f"{name} has the type {values.dtype}. Pass integers: tokens of each sequence.")
    values = values.astype(np.int64, copy=False)
    worst = int(values.argmin())
    if values[worst] < least:
        raise ValueError(
            f"Sequence {worst} has {values[worst]} tokens in {name}, and the least allowed is {least}. "
            "Leave such sequences out before packing."
        )
    return values


def check_capacity(capacity: object) -> None:
    """Refuse a capacity that holds no token."""
    check_count("capacity", capacity, "It is the number of slots of a pack, for example 8192.")


def check_count(name: str, value: object, advice: str) -> None:
    """Refuse what is no whole number of at least one, and say what the number means."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name}={value!r}: wanted a whole number, at least 1. {advice}")


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
