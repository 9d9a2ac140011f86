"""What a user passes as lengths, capacity and alignment -> checked integers, and the slots of a pack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from lightning_thd.alignment import Alignment

IntArray = npt.NDArray[np.int64]

MOST_SLOTS = 2**31 - 1  # of a pack: cu_seqlens are int32
MOST_RANKS = 2**20  # of a job; a plan is a list a rank


def as_lengths(
    lengths: npt.ArrayLike | Sequence[int], *, name: str = "lengths", least: int = 1
) -> npt.NDArray[np.int64]:
    """Check a list, array or CPU tensor of ints, each ``least`` or above, and return it as int64 ``[S]``.

    Returns:
        int64 ``[S]``. ``as_lengths((3, 4))`` becomes ``array([3, 4])``.

    Raises:
        TypeError: for what is no array of numbers.
        ValueError: when it is not one-dimensional, not of integers, or holds a value below ``least``.
    """
    values = as_integers(lengths, name)
    if values.size and values.min() < least:
        worst = int(values.argmin())
        raise ValueError(
            f"Sequence {worst} has {values[worst]} tokens in {name}, and the least allowed is {least}. "
            "Leave such sequences out before packing."
        )
    return values


def as_array(values: object, name: str) -> npt.NDArray[Any]:
    """Return numbers given as a list, an array, or a tensor on the CPU as an array, without a copy of one.

    Raises:
        TypeError: for what is no such thing.
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as err:
        raise TypeError(
            f"{name} is a {type(values).__name__} that is no array of numbers ({err}). "
            "Pass a list, a numpy array, or a tensor on the CPU."
        ) from err
    if array.ndim == 0 and array.dtype.kind in "OUS":
        raise TypeError(
            f"{name} is a {type(values).__name__} that is no array of numbers. Pass a list, a numpy "
            "array, or a tensor on the CPU."
        )
    return array


def as_integers(values: object, name: str) -> IntArray:
    """Return integers given as a list, an array, or a tensor on the CPU as int64 ``[N]``.

    Raises:
        TypeError: for what is no array of numbers.
        ValueError: when it is not one-dimensional, not of integers, or too large for int64.
    """
    array = as_array(values, name)
    if array.ndim != 1:
        raise ValueError(f"{name} has the shape {array.shape}. Pass one integer a sequence, shape [S].")
    if not array.size:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu" or (array.dtype.kind == "u" and int(array.max()) >= 2**63):
        raise ValueError(
            f"{name} has the type {array.dtype}, or numbers beyond int64. Pass integers, one a sequence."
        )
    return array.astype(np.int64, copy=False)


def check_capacity(capacity: object) -> None:
    """Refuse a capacity that holds no token."""
    advice = "It is the number of slots of a pack, for example 8192."
    check_count("capacity", capacity, advice, most=MOST_SLOTS)


def check_count(name: str, value: object, advice: str, *, least: int = 1, most: int | None = None) -> None:
    """Raise unless a value is a whole number in ``[least, most]``, and say what the number means."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or cast("int", value) < least or (most is not None and cast("int", value) > most):
        wanted = f"at least {least}" + (f" and at most {most}" if most is not None else "")
        raise ValueError(f"{name}={value!r}: wanted a whole number, {wanted}. {advice}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise unless a value is one of some words."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}={value!r} is unknown. Choose one of {', '.join(choices)}.")


def check_type(name: str, value: object, wanted: type, advice: str) -> None:
    """Raise TypeError for a value that is no instance of a class, saying what to pass."""
    if not isinstance(value, wanted):
        raise TypeError(f"{name} is a {type(value).__name__}, wanted a {wanted.__name__}. {advice}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """The usable slots of a pack, and the multiple of slots that each sequence takes.

    Attributes:
        usable: slots of a pack, a multiple of ``multiple``.
        multiple: slots of a sequence are rounded up to this.
    """

    usable: int
    multiple: int

    def padded(self, lengths: IntArray) -> IntArray:
        """Return the slots that sequences of these lengths take."""
        return -(-lengths // self.multiple) * self.multiple


def make_slots(capacity: int, align: Alignment | None) -> Slots:
    """Return how many slots of a capacity an alignment leaves usable.

    Returns:
        The slots: ``capacity=100`` with multiples of 8 and 32 leaves 96 slots, in steps of 8.

    Raises:
        ValueError: when the alignment leaves no slot.
    """
    check_capacity(capacity)
    if align is not None:
        check_type("align", align, Alignment, "Pass Alignment(sequence_multiple=..., total_multiple=...).")
    if align is None:
        return Slots(usable=int(capacity), multiple=1)
    usable = int(capacity) // align.total_multiple * align.total_multiple
    if not usable:
        raise ValueError(
            f"capacity={capacity} is below total_multiple={align.total_multiple} of {align}: no pack can be "
            f"aligned. Raise capacity to {align.total_multiple} or more."
        )
    return Slots(usable=usable, multiple=align.sequence_multiple)
