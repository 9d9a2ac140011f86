"""Lengths, windows, grids and offsets as users hold them -> sums in host integers, for ``stats``."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lightning_thd._checks import host_ints, whole_number

IntArray: TypeAlias = npt.NDArray[np.int64]
_Sum = TypeVar("_Sum", int, IntArray)
Ints: TypeAlias = Sequence[int] | IntArray | Tensor
IntRows: TypeAlias = Sequence[Sequence[int]] | Sequence[int] | IntArray | Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """A window of attention inside fixed chunks of a sequence, as in Llama 4.

    Attributes:
        size: tokens in a chunk; ``Chunk(4)`` lets token 5 of a sequence see tokens 4 and 5.
    """

    size: int

    def __post_init__(self) -> None:
        whole_number(self.size, "Chunk.size", least=1, most=2**62, advice="It is the tokens of a chunk.")


@dataclass(frozen=True, slots=True)
class Blocks:
    """A window of one compressed key for every whole block of a sequence, as in DeepSeek-V4.

    A query sees the blocks that end at or before it, its own token among theirs, or ``most`` of them.

    Attributes:
        size: tokens in a block; ``Blocks(4)`` lets tokens 0 to 2 of a sequence see nothing, 3 to 6 one key.
        most: keys a query sees at the most, None for all.
    """

    size: int
    most: int | None = None

    def __post_init__(self) -> None:
        whole_number(self.size, "Blocks.size", least=1, most=2**62, advice="It is the tokens of a block.")
        if self.most is not None:
            whole_number(self.most, "Blocks.most", least=1, most=2**62, advice="None means all of them.")


Window: TypeAlias = int | Chunk | Blocks


def sums(lengths: IntArray) -> tuple[int, int, int, int]:
    """Return the sum, the number above zero, the sum of squares and the smallest of lengths."""
    if not lengths.size:
        return 0, 0, 0, 0
    refuse_overflow(float(lengths.max()) * float(lengths.sum(dtype=np.float64)), "lengths")
    return int(lengths.sum()), int(np.count_nonzero(lengths)), int(lengths @ lengths), int(lengths.min())


def window_pairs(lengths: Ints, window: Window, *, ends: Ints) -> IntArray:
    """Count the pairs (query, key) that causal queries see through a window, their own key among them.

    Args:
        lengths: real tokens of every sequence.
        window: tokens a query sees, or ``Chunk``, or ``Blocks``.
        ends: where runs of sequences end, to be counted apart; ``[len(lengths)]`` for one run.

    Returns:
        int64, one number a run: ``([5, 2], 2, ends=[1, 2])`` gives 1 + 2 + 2 + 2 + 2 = 9 and 1 + 2 = 3.
    """
    values = non_negative(lengths, "lengths")
    refuse_overflow(float(values.max(initial=0)) * float(values.sum(dtype=np.float64)), "lengths")
    runs = int64(ends, "ends")
    if not runs.size or runs[0] < 0 or runs[-1] != values.size or (np.diff(runs) < 0).any():
        raise ValueError(
            f"ends {short(runs.tolist())} do not cut {values.size} lengths into runs; wanted numbers that "
            "never decrease and end with the number of lengths. Pass [len(lengths)] for one run."
        )
    starts = np.concatenate(([0], runs[:-1]))
    full = starts < runs

    def sums(values: IntArray) -> IntArray:
        found: IntArray = np.zeros(len(runs), dtype=np.int64)
        if full.any():  # reduceat gives an empty run the element after it
            found[full] = np.add.reduceat(values, starts[full])
        return found

    return pairs(values, window, sums)


def pairs(lengths: IntArray, window: Window, sums: Callable[[IntArray], _Sum]) -> _Sum:
    """Count the query-key pairs of a window from sums over lengths."""
    if isinstance(window, Blocks):  # block j, of those that end, is seen by all tokens from its last one on
        seen: IntArray = lengths // window.size
        seen = seen if window.most is None else np.minimum(seen, window.most)
        # sum over j = 1 .. seen of (length - j x size + 1)
        return sums(seen * (lengths + 1) - window.size * (seen * (seen + 1) // 2))
    size = (
        window.size if isinstance(window, Chunk) else whole_number(window, "A window", least=None, most=2**62)
    )
    if size < 1:
        raise ValueError(
            f"A window of {size} tokens sees nothing. Windows are 1 or more; leave out what has none."
        )
    if isinstance(window, Chunk):
        whole, rest = lengths // size, lengths % size
        return sums(whole) * (size * (size + 1) // 2) + (sums(rest * rest) + sums(rest)) // 2
    if lengths.max(initial=0) <= size:  # nothing ends: one sum instead of three, which take the time
        return sums(lengths * (lengths + 1)) // 2
    seen = np.minimum(lengths, size)
    within = sums(seen)
    return (sums(seen * seen) + within) // 2 + (sums(lengths) - within) * size


def refuse_overflow(squares: float, name: str) -> None:
    """Raise where a sum of squares, bounded by ``squares``, could pass int64."""
    if squares >= 2.0**63:
        raise ValueError(
            f"{name} are so large that their squares may pass int64. Were they multiplied, or is one wrong? "
            "Otherwise count parts of the data and add their SeqStats."
        )


def total(values: IntArray) -> int:
    """Sum to a Python integer."""
    return int(values.sum())


def cross(lengths: Ints, cross_lengths: Ints) -> tuple[int, int]:
    """Count the keys of cross attention and the pairs with them: ``([2, 3], [4, 5])`` gives ``(9, 23)``."""
    here, there = int64(lengths, "lengths"), int64(cross_lengths, "cross_lengths")
    if here.shape != there.shape or there.min(initial=0) < 0:
        raise ValueError(
            f"cross_lengths {short(there.tolist())} does not fit the {here.size} sequences. "
            "Give every sequence the number of tokens its cross-attention reads, zero if none."
        )
    refuse_overflow(float(here.astype(np.float64) @ there.astype(np.float64)), "cross_lengths")
    return int(there.sum()), int(here @ there)


def vision(
    image_grid_thw: IntRows | None, video_grid_thw: IntRows | None, windows: tuple[int, ...]
) -> tuple[int, int, tuple[tuple[int, int], ...]]:
    """Count patches, squared patches of every frame, and squared patches inside windows, from grids."""
    if image_grid_thw is None and video_grid_thw is None:
        return 0, 0, ()
    given = [_grid(grid) for grid in (image_grid_thw, video_grid_thw) if grid is not None]
    grid = np.concatenate(given)
    if grid.min(initial=1) < 1:
        raise ValueError(f"grid_thw holds {grid.min()}. Frames, rows and columns of patches are 1 or more.")
    frames, rows, columns = grid.T
    most = [float(axis.max(initial=0)) for axis in (frames, rows, columns)]
    refuse_overflow(most[0] * (most[1] * most[2]) ** 2 * len(grid), "grid_thw")
    area = rows * columns
    in_windows = tuple(
        (edge, int((frames * edge_squares(rows, edge) * edge_squares(columns, edge)).sum()))
        for edge in windows
    )
    return int((frames * area).sum()), int((frames * area * area).sum()), in_windows


def _grid(values: IntRows) -> IntArray:
    grid = rows_int64(values, "grid_thw")
    if grid.size % 3 or (grid.ndim > 1 and grid.shape[-1] != 3):
        raise ValueError(
            f"grid_thw has shape {grid.shape}; wanted [N, 3]: frames, rows and columns of patches "
            "of each image."
        )
    return grid.reshape(-1, 3)


def edge_squares(patches: IntArray, edge: int) -> IntArray:
    """Sum the squared pieces of ``patches`` cut every ``edge``: 5 cut every 2 gives 4 + 4 + 1."""
    whole, rest = patches // edge, patches % edge
    return whole * edge * edge + rest * rest


def int64(values: Ints, name: str) -> IntArray:
    """Convert to a host int64 array, since int32 squares overflow above 46,340 tokens."""
    if isinstance(values, (list, tuple)):
        try:  # three times as fast as numpy's own way from Python integers
            return np.frombuffer(struct.pack(f"{len(values)}q", *values), dtype=np.int64)
        except struct.error:
            pass  # rows, or no integers
    array: IntArray = host_ints(values, name)
    return array


def rows_int64(values: IntRows, name: str) -> IntArray:
    """Convert to a host int64 array of any number of dimensions."""
    array: IntArray = host_ints(values, name, ndim=None)
    return array


def non_negative(values: Ints, name: str) -> IntArray:
    """Convert to a host int64 array ``[S]`` and raise for values below zero."""
    array = int64(values, name)
    if array.min(initial=0) < 0:
        raise ValueError(
            f"{name} holds {array.min()}. A sequence has zero or more tokens: pass real lengths."
        )
    return array


def rows_of(cu_seqlens: IntRows, name: str) -> list[list[int]]:
    """Read offsets of one row or several as lists of host integers."""
    array = rows_int64(cu_seqlens, name)
    if array.ndim not in (1, 2):
        raise ValueError(f"{name} has shape {array.shape}. Pass [S + 1] or [rows, S + 1].")
    return [[int(value) for value in row] for row in (array.reshape(1, -1) if array.ndim < 2 else array)]


def trim(row: list[int], argmin: int | None) -> list[int]:
    """Return offsets without the tail that holds no sequences; refuse negative or falling ones."""
    argmin = None if argmin is None else whole_number(argmin, "argmin", least=None)
    if argmin is not None and not 0 <= argmin <= len(row):
        raise ValueError(
            f"argmin={argmin} is outside the {len(row)} offsets. Pass the number of valid offsets."
        )
    offsets = row[:argmin] if argmin else list(row)
    while len(offsets) > 1 and offsets[-1] in (-1, 0) and not all(value == 0 for value in offsets):
        offsets.pop()
    falls = any(here > there for here, there in pairwise(offsets))
    if falls or (offsets and offsets[0] != 0):
        raise ValueError(
            f"cu_seqlens {short(row)} must start at 0 and never decrease, but for a tail of -1 or 0. "
            "Pass cumulative lengths, such as [0, 3, 8] for lengths 3 and 5."
        )
    return offsets


def dense_shape(shape: tuple[int, int] | None, row: list[int]) -> tuple[int, int]:
    """Return the rows and row length of a batch without usable offsets, or raise if not given."""
    if shape is not None:
        try:
            rows, row_length = shape
        except (TypeError, ValueError):
            raise ValueError(f"shape={shape!r}; wanted two numbers, rows and row length.") from None
        shape = tuple(whole_number(size, "shape", least=None) for size in (rows, row_length))  # type: ignore[assignment]
    if shape is None or min(shape) < 0:
        raise ValueError(
            f"cu_seqlens {short(row)} describes no sequence and shape={shape}. "
            "Pass shape=(rows, row length) of the token tensor to count every row as one sequence."
        )
    return int(shape[0]), int(shape[1])


def short(row: list[int]) -> str:
    """Format at most eight numbers, for messages."""
    return f"{row[:8]}..." if len(row) > 8 else f"{row}"
