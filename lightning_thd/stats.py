"""Sequence lengths or cu_seqlens on the host -> SeqStats: what a batch contains, in host integers.

FLOPs are linear in these integers, so they can be added over microbatches, steps and ranks first and
turned into FLOPs once, by ``flops.FlopsModel``. Nothing here is a tensor: building them on the host
costs microseconds and no device read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

IntArray: TypeAlias = npt.NDArray[np.int64]
_Sum = TypeVar("_Sum", int, IntArray)
Ints: TypeAlias = Sequence[int] | IntArray | Tensor
IntRows: TypeAlias = Sequence[Sequence[int]] | Sequence[int] | IntArray | Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """Attention inside fixed chunks of a sequence, as in Llama 4; stands among ``windows`` where it is one.

    Attributes:
        size: tokens in a chunk; ``Chunk(4)`` lets token 5 of a sequence see tokens 4 and 5.
    """

    size: int


Window: TypeAlias = int | Chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class SeqStats:
    """What one or more batches contain: host integers that add with ``+`` and ``sum``.

    ``SeqStats.from_lengths([3, 5])`` has 8 real tokens and slots, 6 loss tokens, 2 sequences, 34 squares.

    Attributes:
        real_tokens: tokens that belong to a sequence.
        slots: tokens with padding; what the device computes on.
        loss_tokens: tokens with a target.
        sequences: sequences of at least one token.
        sum_squares: sum of the squared lengths.
        window_pairs: per window, the pairs (query, key) a causal query sees: sum of min(i + 1, window).
        cross_tokens: tokens of the other side that cross-attention reads keys and values from.
        cross_pairs: sum of length x other length.
        vision_patches: patches of all images and video frames.
        vision_squares: sum over frames of the squared number of patches.
        vision_window_pairs: per window edge (in patches), the sum over windows of their squared patches.
    """

    real_tokens: int = 0
    slots: int = 0
    loss_tokens: int = 0
    sequences: int = 0
    sum_squares: int = 0
    window_pairs: tuple[tuple[Window, int], ...] = ()
    cross_tokens: int = 0
    cross_pairs: int = 0
    vision_patches: int = 0
    vision_squares: int = 0
    vision_window_pairs: tuple[tuple[int, int], ...] = ()

    @property
    def windows(self) -> tuple[Window, ...]:
        """The windows whose pairs were counted."""
        return tuple(window for window, _ in self.window_pairs)

    def merged_patches(self, merge_size: int = 2) -> int:
        """Image tokens the text model sees: patches merged ``merge_size`` x ``merge_size`` into one."""
        return self.vision_patches // (merge_size * merge_size)

    @classmethod
    def from_lengths(
        cls,
        lengths: Ints,
        *,
        windows: Iterable[Window] = (),
        slots: int | None = None,
        loss_tokens: int | None = None,
        cross_lengths: Ints | None = None,
        image_grid_thw: IntRows | None = None,
        video_grid_thw: IntRows | None = None,
        vision_windows: Iterable[int] = (),
    ) -> SeqStats:
        """Count a batch from the lengths of its sequences.

        Args:
            lengths: real tokens of every sequence, zero allowed, on the host.
            windows: attention windows of the model (``FlopsModel.windows``).
            slots: tokens with padding; default the sum of the lengths.
            loss_tokens: tokens with a target; default every token but the first of each sequence.
            cross_lengths: per sequence, the tokens its cross-attention reads.
            image_grid_thw: ``[N, 3]`` frames, rows and columns of patches of each image.
            video_grid_thw: the same for each video.
            vision_windows: window edges of the vision tower, in patches (``FlopsModel.vision_windows``).

        Returns:
            ``([3, 5], windows=(2,))`` gives 8 tokens, 34 squares and 5 + 9 = 14 pairs of window 2.
        """
        lengths = _int64(lengths, "lengths")
        real_tokens, sequences, sum_squares, lowest = _sums(lengths)
        if lowest < 0:
            raise ValueError(
                f"lengths holds {lowest}. A sequence has zero or more tokens: pass real lengths."
            )
        slots = real_tokens if slots is None else int(slots)
        loss_tokens = real_tokens - sequences if loss_tokens is None else loss_tokens
        if slots < real_tokens:
            raise ValueError(
                f"slots={slots} is less than the {real_tokens} real tokens of the sequences. "
                "Slots include the padding: leave slots out when nothing is padded."
            )
        if not 0 <= loss_tokens <= slots:
            raise ValueError(
                f"loss_tokens={loss_tokens} is outside 0..{slots} slots. Count targets that are >= 0."
            )
        pairs = tuple((window, _pairs(lengths, window, _total)) for window in windows)
        cross_tokens, cross_pairs = (0, 0) if cross_lengths is None else _cross(lengths, cross_lengths)
        patches, squares, in_windows = _vision(image_grid_thw, video_grid_thw, tuple(vision_windows))
        return cls(
            real_tokens=real_tokens,
            slots=slots,
            loss_tokens=loss_tokens,
            sequences=sequences,
            sum_squares=sum_squares,
            window_pairs=pairs,
            cross_tokens=cross_tokens,
            cross_pairs=cross_pairs,
            vision_patches=patches,
            vision_squares=squares,
            vision_window_pairs=in_windows,
        )

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: IntRows | None,
        *,
        cu_seqlens_unpadded: IntRows | None = None,
        argmin: int | None = None,
        shape: tuple[int, int] | None = None,
        windows: Iterable[Window] = (),
        image_grid_thw: IntRows | None = None,
        video_grid_thw: IntRows | None = None,
        vision_windows: Iterable[int] = (),
    ) -> SeqStats:
        """Count a batch from cumulative lengths as data pipelines hand them out, padded tails included.

        The unpadded offsets win. What follows ``argmin``, repeats the last offset, or is a tail of -1 or 0
        is no sequence. Fewer than two offsets mean that nothing is packed: every row is one sequence.

        Args:
            cu_seqlens: ``[S + 1]``, or ``[rows, S + 1]`` where every row starts anew; None when dense.
            cu_seqlens_unpadded: the same without the padding between sequences.
            argmin: number of valid offsets; None or 0 when all are valid.
            shape: (rows, row length) of the token tensor, for the dense fallback and the number of slots.
            windows: attention windows of the model (``FlopsModel.windows``).
            image_grid_thw: ``[N, 3]`` frames, rows and columns of patches of each image.
            video_grid_thw: the same for each video.
            vision_windows: window edges of the vision tower, in patches.

        Returns:
            ``([0, 3, 8, 8, -1])`` has lengths 3 and 5; ``([0], shape=(1, 8))`` has the one length 8.
        """
        padded = [] if cu_seqlens is None else _rows(cu_seqlens, "cu_seqlens")
        unpadded = [] if cu_seqlens_unpadded is None else _rows(cu_seqlens_unpadded, "cu_seqlens_unpadded")
        rows = [_trim(row, argmin) for row in (unpadded or padded or [[]])]
        if len(rows) == 1 and len(rows[0]) < 2:
            row_count, row_length = _dense_shape(shape, rows[0])
            lengths = [row_length] * row_count
        else:
            lengths = []
            for row in rows:
                dense = len(row) < 2
                lengths += [_dense_shape(shape, row)[1]] if dense else np.diff(row).tolist()
        held = sum(max(row, default=0) for row in padded)
        slots = max(shape[0] * shape[1] if shape else 0, held, sum(lengths))
        return cls.from_lengths(
            lengths,
            windows=windows,
            slots=slots,
            image_grid_thw=image_grid_thw,
            video_grid_thw=video_grid_thw,
            vision_windows=vision_windows,
        )

    def __add__(self, other: SeqStats) -> SeqStats:
        return combine((self, other)) if isinstance(other, SeqStats) else NotImplemented

    def __radd__(self, other: int) -> SeqStats:  # sum() starts with 0
        return self if other == 0 else NotImplemented


def combine(stats: Sequence[SeqStats]) -> SeqStats:
    """Add many ``SeqStats`` at once.

    Args:
        stats: batches counted with the same windows; a batch of no tokens may lack them.

    Returns:
        The sums; of nothing, zeros.
    """
    totals: dict[str, Any] = {name: sum([getattr(one, name) for one in stats]) for name in _COUNTS}
    totals["window_pairs"] = _join([(one.window_pairs, one.slots) for one in stats], "windows")
    totals["vision_window_pairs"] = _join(
        [(one.vision_window_pairs, one.vision_patches) for one in stats], "vision_windows"
    )
    return SeqStats(**totals)


_COUNTS = tuple(field.name for field in fields(SeqStats) if not field.name.endswith("window_pairs"))


def _join(
    counted: list[tuple[tuple[tuple[Any, int], ...], int]], argument: str
) -> tuple[tuple[Any, int], ...]:
    """Add (window, pairs) by window; whoever holds anything must have counted every window."""
    totals: dict[Any, int] = {}
    for pairs, _ in counted:
        for window, count in pairs:
            totals[window] = totals.get(window, 0) + count
    for pairs, held in counted:
        if held and len(pairs) != len(totals):
            have = [window for window, _ in pairs]
            raise ValueError(
                f"Cannot add stats counted with {argument}={have} to stats counted with {list(totals)}. "
                f"Build all of them with the same {argument}: those of FlopsModel."
            )
    return tuple(totals.items())


def _sums(lengths: IntArray) -> tuple[int, int, int, int]:
    """Lengths -> (sum, number above zero, sum of squares, smallest)."""
    if not lengths.size:
        return 0, 0, 0, 0
    return int(lengths.sum()), int(np.count_nonzero(lengths)), int(lengths @ lengths), int(lengths.min())


def window_pairs(lengths: Ints, window: Window, *, ends: Ints) -> IntArray:
    """Pairs (query, key) that causal queries see through a window, the query's own among them.

    Args:
        lengths: real tokens of every sequence.
        window: tokens a query sees, or ``Chunk``.
        ends: where runs of sequences end, to be counted apart; ``[len(lengths)]`` for one run.

    Returns:
        int64, one number a run: ``([5, 2], 2, ends=[1, 2])`` gives 1 + 2 + 2 + 2 + 2 = 9 and 1 + 2 = 3.
    """
    runs = _int64(ends, "ends")

    def sums(values: IntArray) -> IntArray:
        running: IntArray = np.cumsum(np.concatenate(([0], values)))[runs]
        return np.diff(running, prepend=0)

    return _pairs(_int64(lengths, "lengths"), window, sums)


def _pairs(lengths: IntArray, window: Window, sums: Callable[[IntArray], _Sum]) -> _Sum:
    """Pairs behind a window from sums alone; divided after them, since numpy divides integers slowly."""
    size = window.size if isinstance(window, Chunk) else window
    if size < 1:
        raise ValueError(
            f"A window of {size} tokens sees nothing. Windows are 1 or more; leave out what has none."
        )
    if isinstance(window, Chunk):
        whole, rest = lengths // size, lengths % size
        return sums(whole) * (size * (size + 1) // 2) + (sums(rest * rest) + sums(rest)) // 2
    seen: IntArray = np.minimum(lengths, size)
    within = sums(seen)
    return (sums(seen * seen) + within) // 2 + (sums(lengths) - within) * size


def _total(values: IntArray) -> int:
    return int(values.sum())


def _cross(lengths: Ints, cross_lengths: Ints) -> tuple[int, int]:
    here, there = _int64(lengths, "lengths"), _int64(cross_lengths, "cross_lengths")
    if here.shape != there.shape or there.min(initial=0) < 0:
        raise ValueError(
            f"cross_lengths {_short(there.tolist())} does not fit the {here.size} sequences. "
            "Give every sequence the number of tokens its cross-attention reads, zero if none."
        )
    return int(there.sum()), int(here @ there)


def _vision(
    image_grid_thw: IntRows | None, video_grid_thw: IntRows | None, windows: tuple[int, ...]
) -> tuple[int, int, tuple[tuple[int, int], ...]]:
    """Grids -> (patches, sum of squared patches of a frame, the same inside windows)."""
    if image_grid_thw is None and video_grid_thw is None:
        return 0, 0, ()
    given = [
        _int64(grid, "grid_thw").reshape(-1, 3)
        for grid in (image_grid_thw, video_grid_thw)
        if grid is not None
    ]
    grid = np.concatenate(given)
    if grid.min(initial=1) < 1:
        raise ValueError(f"grid_thw holds {grid.min()}. Frames, rows and columns of patches are 1 or more.")
    frames, rows, columns = grid.T
    area = rows * columns
    in_windows = tuple(
        (edge, int((frames * _edge(rows, edge) * _edge(columns, edge)).sum())) for edge in windows
    )
    return int((frames * area).sum()), int((frames * area * area).sum()), in_windows


def _edge(patches: IntArray, edge: int) -> IntArray:
    """Sum of squared pieces when ``patches`` are cut every ``edge``: 5 cut every 2 gives 4 + 4 + 1."""
    whole, rest = patches // edge, patches % edge
    return whole * edge * edge + rest * rest


def _int64(values: IntRows, name: str) -> IntArray:
    """Host int64 array of ``values``; int32 squares would overflow above 46,340 tokens."""
    if isinstance(values, (list, tuple)):
        try:  # three times as fast as numpy's own way from Python integers
            return np.frombuffer(struct.pack(f"{len(values)}q", *values), dtype=np.int64)
        except struct.error:
            pass  # rows, or no integers
    array: npt.NDArray[Any] = values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{name} holds {array.dtype} values. Pass integers.")
    return np.asarray(array, dtype=np.int64)


def _rows(cu_seqlens: IntRows, name: str) -> list[list[int]]:
    array = _int64(cu_seqlens, name)
    if array.ndim > 2:
        raise ValueError(f"{name} has shape {array.shape}. Pass [S + 1] or [rows, S + 1].")
    return [[int(value) for value in row] for row in (array.reshape(1, -1) if array.ndim < 2 else array)]


def _trim(row: list[int], argmin: int | None) -> list[int]:
    """Cut the tail that is no sequence off; refuse offsets that are negative or decrease before it."""
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
            f"cu_seqlens {_short(row)} must start at 0 and never decrease, but for a tail of -1 or 0. "
            "Pass cumulative lengths, such as [0, 3, 8] for lengths 3 and 5."
        )
    return offsets


def _dense_shape(shape: tuple[int, int] | None, row: list[int]) -> tuple[int, int]:
    if shape is None or min(shape) < 0:
        raise ValueError(
            f"cu_seqlens {_short(row)} describes no sequence and shape={shape}. "
            "Pass shape=(rows, row length) of the token tensor to count every row as one sequence."
        )
    return int(shape[0]), int(shape[1])


def _short(row: list[int]) -> str:
    return f"{row[:8]}..." if len(row) > 8 else f"{row}"
