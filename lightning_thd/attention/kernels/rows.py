"""Rows of a packed tensor <-> the [B, rows, ...] batch of one kernel call, as views where the spacing allows.

Legend: T slots, B tiles of a call.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

Starts = tuple[int, ...]

# Calls whose index arrays are kept: those of a pack or two; every layer asks again, forward and backward.
_KEPT = 128


def take(x: Tensor, starts: Starts, length: int, lengths: Starts | None = None) -> Tensor:
    """Return ``length`` rows from every start, as one batch.

    Args:
        x: ``[T, ...]``.
        starts: first row of every tile.
        length: rows of a tile; tiles may overlap.
        lengths: real rows of every tile; beyond them the tile's first row repeats. None where all are real.

    Returns:
        ``[B, length, ...]``, a view of x when the starts are evenly spaced. Do not write into it.
    """
    step = _spacing(starts)
    if lengths is None and step is not None:
        return _window(x, starts[0], step, len(starts), length)
    return x.index_select(0, _indices(starts, length, lengths)).view(len(starts), length, *x.shape[1:])


def put(x: Tensor, part: Tensor, starts: Starts, lengths: Starts | None = None) -> None:
    """Write the tiles of ``part`` ``[B, rows, ...]`` to x; tiles do not overlap, padded rows are dropped."""
    step = _spacing(starts)
    if lengths is None and step is not None:
        _window(x, starts[0], step, len(starts), part.shape[1]).copy_(part)
        return
    part = part.flatten(0, 1)
    if lengths is not None:
        part = part.index_select(0, _real_rows(part.shape[0] // len(starts), lengths))
    x.index_copy_(0, _indices_of_real(starts, part.shape[0] // len(starts), lengths), part)


def add(x: Tensor, part: Tensor, starts: Starts) -> None:
    """Add the tiles of ``part`` ``[B, rows, ...]`` to x, in a fixed order where they overlap."""
    step, length = _spacing(starts), part.shape[1]
    if len(starts) == 1 or step is None:
        for b, start in enumerate(starts):
            x[start : start + length] += part[b]
        return
    for low in range(0, length, step):
        width = min(step, length - low)
        _window(x, starts[0] + low, step, len(starts), width).add_(part[:, low : low + width])


def fill_padding(part: Tensor, lengths: Starts, value: float) -> None:
    """Set the padded rows of ``part`` ``[B, rows, ...]`` to a value, in place."""
    part.flatten(0, 1).index_fill_(0, _padded_rows(part.shape[1], lengths), value)


def _window(x: Tensor, start: int, step: int, count: int, length: int) -> Tensor:
    stride = x.stride(0)
    return x.as_strided(
        (count, length, *x.shape[1:]), (step * stride, *x.stride()), x.storage_offset() + start * stride
    )


def _spacing(starts: Starts) -> int | None:
    """Return the distance between starts if all are equal and positive, else None; 1 for a single start."""
    if len(starts) == 1:
        return 1
    step = starts[1] - starts[0]
    even = step > 0 and all(b - a == step for a, b in pairwise(starts))
    return step if even else None


@lru_cache(maxsize=_KEPT)
def _indices(starts: Starts, length: int, lengths: Starts | None) -> Tensor:
    grid = np.arange(length)[None, :]
    if lengths is not None:
        grid = np.where(grid < np.array(lengths)[:, None], grid, 0)
    return torch.from_numpy((np.array(starts)[:, None] + grid).ravel())


@lru_cache(maxsize=_KEPT)
def _indices_of_real(starts: Starts, length: int, lengths: Starts | None) -> Tensor:
    if lengths is None:
        return _indices(starts, length, None)
    return torch.from_numpy(
        np.concatenate([np.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)])
    )


@lru_cache(maxsize=_KEPT)
def _real_rows(length: int, lengths: Starts) -> Tensor:
    return torch.from_numpy(np.flatnonzero(_is_real(length, lengths)))


@lru_cache(maxsize=_KEPT)
def _padded_rows(length: int, lengths: Starts) -> Tensor:
    return torch.from_numpy(np.flatnonzero(~_is_real(length, lengths)))


def _is_real(length: int, lengths: Starts) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    real: np.ndarray[tuple[int, int], np.dtype[np.bool_]] = (
        np.arange(length)[None, :] < np.array(lengths)[:, None]
    )
    return real
