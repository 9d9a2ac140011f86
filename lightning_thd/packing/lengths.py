"""What a user passes as lengths and capacity -> checked integers, or an error that says what is wrong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


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
