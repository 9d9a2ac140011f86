"""Offsets of a pack whose sequences are padded one by one -> the lengths without padding, on the host.

A model is told the offsets in memory alone. What depends on the real length of a sequence, like a rope that
turns longer sequences differently, finds it here by the offsets' tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

_NAME = "_thd_lengths"


def remember_lengths(cu_seqlens_padded: Tensor, lengths: Sequence[int]) -> None:
    """Keep the real lengths beside the offsets of the padded ones, as long as that tensor lives."""
    offsets: Any = cu_seqlens_padded
    setattr(offsets, _NAME, tuple(lengths))


def lengths_of(cu_seqlens_padded: Tensor, padded: Sequence[int]) -> tuple[int, ...]:
    """Return the real length of every sequence: what was remembered, else ``padded`` itself.

    Args:
        cu_seqlens_padded: int32 ``[S + 1]``, the tensor that ``remember_lengths`` was given.
        padded: of S sequences, their slots.

    Returns:
        S lengths. Slots of 8 and 4, with 5 remembered for the first, give 5 and 4: a trailing sequence of
        padding counts as it is.
    """
    known: tuple[int, ...] = getattr(cu_seqlens_padded, _NAME, ())
    return (*known, *padded[len(known) :])
