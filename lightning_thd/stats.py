"""Sequence lengths or cu_seqlens on the host -> SeqStats, the counts of a batch as host integers.

FLOPs are linear in these integers. So the counts of microbatches, steps and ranks are added first, and
``flops.FlopsModel`` converts the sum to FLOPs once. This module makes no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lightning_thd._checks import described, host_ints, whole_number

IntArray: TypeAlias = npt.NDArray[np.int64]
Ints: TypeAlias = Sequence[int] | IntArray | Tensor
IntRows: TypeAlias = Sequence[Sequence[int]] | Sequence[int] | IntArray | Tensor
_Sum = TypeVar("_Sum", int, IntArray)

__all__ = [
    "Blocks",
    "Chunk",
    "IntArray",
    "IntRows",
    "Ints",
    "SeqStats",
    "Vision",
    "Window",
    "combine",
    "window_pairs",
]

_NO_PICTURES: tuple[int, int, tuple[tuple[int, int], ...]] = (0, 0, ())  # the counts of no images
_LARGEST = 2**62  # tokens of a window; more would overflow int64 in the sums below


@dataclass(frozen=True, slots=True)
class Chunk:
    """An attention window that is a fixed chunk of a sequence, as in Llama 4."""

    size: int  # tokens in a chunk; ``Chunk(4)`` lets token 5 of a sequence see tokens 4 and 5

    def __post_init__(self) -> None:
        whole_number(self.size, "Chunk.size", least=1, most=_LARGEST, advice="Pass the tokens of a chunk.")


@dataclass(frozen=True, slots=True)
class Blocks:
    """An attention window with one compressed key per complete block of a sequence, as in DeepSeek-V4.

    A query sees the blocks that end at its own token or before, but at most ``most`` of them.
    """

    size: int  # tokens in a block; with ``Blocks(4)``, tokens 0 to 2 of a sequence see no key, 3 to 6 one key
    most: int | None = None  # the largest number of keys that a query sees; None means all

    def __post_init__(self) -> None:
        whole_number(self.size, "Blocks.size", least=1, most=_LARGEST, advice="Pass the tokens of a block.")
        if self.most is not None:
            whole_number(self.most, "Blocks.most", least=1, most=_LARGEST, advice="None means all of them.")


Window: TypeAlias = int | Chunk | Blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Vision:
    """The sizes of a model's vision tower that are needed to count images."""

    windows: tuple[int, ...] = ()  # edge lengths of the tower's attention windows, in patches
    patch: int | None = None  # edge length of a patch in pixels, for images without a grid; None if unknown


@dataclass(frozen=True, kw_only=True, slots=True)
class SeqStats:
    """Counts of one or more batches, as host integers; add them with ``+`` or ``sum``.

    ``SeqStats.from_lengths([3, 5])`` has 8 real tokens, 8 slots, 6 loss tokens, 2 sequences, sum_squares=34.

    Attributes:
        real_tokens: tokens of sequences, without padding; a shared prefix counts once.
        slots: tokens with padding, on which the device computes.
        loss_tokens: tokens with a target.
        sequences: sequences of at least one token.
        sum_squares: sum of the squared lengths; this and ``window_pairs`` count a shared prefix once.
        window_pairs: per window, the causal (query, key) pairs, min(i + 1, W) at position i for an int W.
        cross_tokens: tokens, such as an encoder's, from which cross-attention gets keys and values.
        cross_pairs: sum over sequences of their length x their cross tokens.
        vision_patches: patches of all images and video frames.
        vision_squares: sum over frames of the squared number of patches.
        vision_window_pairs: per window edge (in patches), the sum over windows of squared patch counts.
        shared_tokens: tokens that are not computed, because another sequence computes the same prefix.
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
    shared_tokens: int = 0

    @property
    def windows(self) -> tuple[Window, ...]:
        """Return the windows whose pairs were counted."""
        return tuple(window for window, _ in self.window_pairs)

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
        prefix_lengths: Ints | None = None,
    ) -> SeqStats:
        """Count a batch from the lengths of its sequences.

        Args:
            lengths: real tokens of every sequence (0 is allowed), on the host.
            windows: attention windows of the model (``FlopsModel.windows``).
            slots: tokens with padding; by default the real tokens.
            loss_tokens: tokens with a target; by default all but one of each sequence.
            cross_lengths: per sequence, the tokens that its cross-attention reads.
            image_grid_thw: ``[N, 3]`` frames, rows and columns of patches of each image.
            video_grid_thw: the same for each video.
            vision_windows: window edges of the vision tower, in patches (``FlopsModel.vision_windows``).
            prefix_lengths: per sequence, the number of first tokens that another sequence computes
                (``batch.prefixes.prefix_lengths``); their tokens, squares and pairs are left out.

        Returns:
            ``([3, 5], windows=(2,))`` gives 8 tokens, 34 squares and 5 + 9 = 14 pairs of window 2.
        """
        lengths = _lengths(lengths)
        prefixes = lengths[:0]
        shared = 0
        if prefix_lengths is not None:
            prefixes = _lengths(prefix_lengths, "prefix_lengths")
            if prefixes.shape != lengths.shape or (prefixes > lengths).any():
                raise ValueError(
                    f"prefix_lengths {_short(prefixes.tolist())} do not fit lengths "
                    f"{_short(lengths.tolist())}. Pass one for each sequence, at most its length."
                )
            shared = int(prefixes.sum())

        real_tokens = int(lengths.sum()) - shared
        sequences = int(np.count_nonzero(lengths))
        if slots is None:
            slots = real_tokens
        if loss_tokens is None:
            loss_tokens = real_tokens + shared - sequences
        if type(slots) is not int or type(loss_tokens) is not int:
            slots = whole_number(slots, "slots", least=None)
            loss_tokens = whole_number(loss_tokens, "loss_tokens", least=None)
        if slots < real_tokens:
            raise ValueError(
                f"slots={slots} is less than the {real_tokens} real tokens. Without padding, leave it out."
            )
        if not 0 <= loss_tokens <= slots + shared:
            raise ValueError(
                f"loss_tokens={loss_tokens} is outside 0..{slots + shared} slots. Leave out targets < 0."
            )

        pairs = []
        for window in dict.fromkeys(windows):  # each once, in their order
            count = _pairs(lengths, window, _total)
            if shared:
                count -= _pairs(prefixes, window, _total)
            pairs.append((window, count))
        cross_tokens, cross_pairs = (0, 0) if cross_lengths is None else _cross(lengths, cross_lengths)
        patches, squares, in_windows = _NO_PICTURES
        if image_grid_thw is not None or video_grid_thw is not None or vision_windows != ():
            patches, squares, in_windows = _vision(image_grid_thw, video_grid_thw, tuple(vision_windows))
        return cls(
            real_tokens=real_tokens,
            slots=slots,
            loss_tokens=loss_tokens,
            sequences=sequences,
            sum_squares=int(lengths @ lengths - prefixes @ prefixes),
            window_pairs=tuple(pairs),
            cross_tokens=cross_tokens,
            cross_pairs=cross_pairs,
            vision_patches=patches,
            vision_squares=squares,
            vision_window_pairs=in_windows,
            shared_tokens=shared,
        )

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: IntRows | None,
        *,
        cu_seqlens_unpadded: IntRows | None = None,
        argmin: int | Tensor | IntArray | None = None,
        shape: tuple[int, int] | None = None,
        windows: Iterable[Window] = (),
        image_grid_thw: IntRows | None = None,
        video_grid_thw: IntRows | None = None,
        vision_windows: Iterable[int] = (),
    ) -> SeqStats:
        """Count a batch from cumulative lengths as data pipelines pass them, with or without a padded tail.

        Lengths come from unpadded offsets if they are given. Only the first ``argmin`` offsets count. Repeats
        of the last offset, and a tail of -1 or 0, are ignored. Fewer than two offsets mean that rows are not
        packed: every row is one sequence.

        Args:
            cu_seqlens: ``[S + 1]``, or ``[rows, S + 1]`` if every row starts at 0; None for dense rows.
            cu_seqlens_unpadded: the same without the padding between sequences.
            argmin: number of valid offsets, as an int or a one-element tensor; None or 0 if all are valid.
            shape: (rows, row length) of the token tensor, for the dense fallback and the number of slots.
            windows: attention windows of the model (``FlopsModel.windows``).
            image_grid_thw: ``[N, 3]`` frames, rows and columns of patches of each image.
            video_grid_thw: the same for each video.
            vision_windows: window edges of the vision tower, in patches.

        Returns:
            ``([0, 3, 8, 8, -1])`` has lengths 3 and 5; ``([0], shape=(1, 8))`` has one sequence of length 8.
        """
        padded = _offset_rows(cu_seqlens, "cu_seqlens")
        unpadded = _offset_rows(cu_seqlens_unpadded, "cu_seqlens_unpadded")
        rows = [_trim(row, argmin) for row in (unpadded or padded or [[]])]
        lengths: list[int] = []
        for row in rows:
            if len(row) > 1:
                lengths += np.diff(row).tolist()
            else:  # not packed: each row of ``shape`` is one sequence
                row_count, row_length = _dense_shape(shape, row)
                lengths += [row_length] * (row_count if len(rows) == 1 else 1)

        # The largest of three numbers, because any of the arguments may leave padding out.
        rows_with_padding = padded if unpadded else rows
        slots_of_offsets = sum(max(row, default=0) for row in rows_with_padding)
        slots_of_shape = 0 if shape is None else math.prod(_dense_shape(shape, []))
        return cls.from_lengths(
            lengths,
            windows=windows,
            slots=max(slots_of_shape, slots_of_offsets, sum(lengths)),
            image_grid_thw=image_grid_thw,
            video_grid_thw=video_grid_thw,
            vision_windows=vision_windows,
        )

    def __add__(self, other: SeqStats) -> SeqStats:
        return combine((self, other)) if isinstance(other, SeqStats) else NotImplemented

    def __radd__(self, other: int) -> SeqStats:  # sum() starts with 0
        return self if other == 0 else NotImplemented


COUNTS = tuple(field.name for field in fields(SeqStats) if not field.name.endswith("window_pairs"))


def combine(stats: Iterable[SeqStats]) -> SeqStats:
    """Add ``SeqStats`` with the same windows; stats without tokens need no windows."""
    stats = list(stats)
    totals: dict[str, Any] = {name: sum([getattr(one, name) for one in stats]) for name in COUNTS}
    totals["window_pairs"] = _join([(one.window_pairs, one.slots) for one in stats], "windows")
    totals["vision_window_pairs"] = _join(
        [(one.vision_window_pairs, one.vision_patches) for one in stats], "vision_windows"
    )
    return SeqStats(**totals)


def _join(
    counted: list[tuple[tuple[tuple[Any, int], ...], int]], argument: str
) -> tuple[tuple[Any, int], ...]:
    """Sum the pairs of each window; raise if the stats of a nonempty batch lack a window.

    ``counted`` holds for each stats the pairs of its windows, and its slots or patches.
    """
    totals: dict[Any, int] = {}
    for pairs, _ in counted:
        for window, count in pairs:
            totals[window] = totals.get(window, 0) + count
    for pairs, size in counted:
        if size and len(pairs) != len(totals):
            counted_windows = [window for window, _ in pairs]
            raise ValueError(
                f"Cannot add stats counted with {argument}={counted_windows} to stats counted with "
                f"{list(totals)}. Build all of them with the same {argument}: those of FlopsModel."
            )
    return tuple(totals.items())


def window_pairs(lengths: Ints, window: Window, *, ends: Ints) -> IntArray:
    """Count a causal window's (query, key) pairs for each run, ``lengths[ends[i - 1] : ends[i]]``."""
    values = _lengths(lengths)
    runs = host_ints(ends, "ends")
    if not runs.size or runs[0] < 0 or runs[-1] != values.size or (np.diff(runs) < 0).any():
        raise ValueError(
            f"ends {_short(runs.tolist())} decrease, or do not end at the {values.size} lengths. Pass the "
            "number of lengths up to the end of each run."
        )
    starts = np.concatenate(([0], runs[:-1]))
    has_lengths = starts < runs

    def sums(values: IntArray) -> IntArray:
        totals: IntArray = np.zeros(len(runs), dtype=np.int64)
        if has_lengths.any():  # leave out empty runs, for which reduceat would return the next element
            totals[has_lengths] = np.add.reduceat(values, starts[has_lengths])
        return totals

    return _pairs(values, window, sums)


def _pairs(lengths: IntArray, window: Window, sums: Callable[[IntArray], _Sum]) -> _Sum:
    """Count the (query, key) pairs of a window; ``sums`` adds one value per length, in total or per run."""
    if isinstance(window, Blocks):  # a block is seen by its last token and by all later tokens
        blocks: IntArray = lengths // window.size
        if window.most is not None:
            blocks = np.minimum(blocks, window.most)
        # sum over j = 1 .. blocks of (length - j x size + 1), the queries that see j blocks or more
        return sums(blocks * (lengths + 1) - window.size * (blocks * (blocks + 1) // 2))

    if isinstance(window, Chunk):
        size = min(window.size, int(lengths.max(initial=0)) + 1)  # the square of a larger one may overflow
        chunks = lengths // size
        rest = lengths % size
        return sums(chunks) * (size * (size + 1) // 2) + (sums(rest * rest) + sums(rest)) // 2

    advice = "Leave out windows that do not end."
    size = whole_number(window, "A window", least=1, most=_LARGEST, advice=advice)
    if lengths.max(initial=0) <= size:  # every query sees all earlier keys, so one sum is enough
        return sums(lengths * (lengths + 1)) // 2
    # The first ``size`` queries of a sequence see 1, 2, 3, ... keys, all later ones ``size``.
    first = np.minimum(lengths, size)
    num_first = sums(first)
    return (sums(first * first) + num_first) // 2 + (sums(lengths) - num_first) * size


def _total(values: IntArray) -> int:
    """Return the sum as a Python int, which does not overflow in what is computed of it."""
    return int(values.sum())


def _lengths(lengths: Ints, name: str = "lengths") -> IntArray:
    """Return lengths as int64 on the host, because int32 squares overflow above 46,340 tokens."""
    advice = "A sequence has zero or more tokens: pass real lengths."
    values: Any = lengths
    # The monitor passes int64 arrays in every step; they need fewer checks.
    is_int64 = isinstance(values, np.ndarray) and values.dtype == np.int64 and values.ndim == 1
    if not is_int64 or values.min(initial=0) < 0:
        values = host_ints(lengths, name, least=0, advice=advice)
    squares = float(values.max(initial=0)) * float(values.sum(dtype=np.float64))
    _refuse_overflow(squares, name)
    checked: IntArray = values
    return checked


def _refuse_overflow(squares: float, name: str) -> None:
    """Raise if a sum of squares, whose upper bound is ``squares``, could exceed int64."""
    if squares >= 2.0**63:
        raise ValueError(
            f"{name} are so large that their squares may pass int64. Count parts of the data and add them."
        )


def _cross(lengths: IntArray, cross_lengths: Ints) -> tuple[int, int]:
    """Count cross-attention's keys and (query, key) pairs: ``([2, 3], [4, 5])`` gives ``(9, 23)``."""
    keys = host_ints(cross_lengths, "cross_lengths")
    if lengths.shape != keys.shape or keys.min(initial=0) < 0:
        raise ValueError(
            f"cross_lengths {_short(keys.tolist())} does not fit the {lengths.size} sequences. Pass 0 for "
            "none."
        )
    _refuse_overflow(float(lengths.astype(np.float64) @ keys.astype(np.float64)), "cross_lengths")
    return int(keys.sum()), int(lengths @ keys)


def _vision(
    image_grid_thw: IntRows | None, video_grid_thw: IntRows | None, windows: tuple[int, ...]
) -> tuple[int, int, tuple[tuple[int, int], ...]]:
    """Count patches, and sum their squared numbers per frame and per window, from grids."""
    for edge in windows:
        whole_number(edge, "A vision window", least=1, advice="Pass FlopsModel.vision_windows.")
    if image_grid_thw is None and video_grid_thw is None:
        return _NO_PICTURES

    grids = [_grid(values) for values in (image_grid_thw, video_grid_thw) if values is not None]
    grid = np.concatenate(grids)
    if grid.min(initial=1) < 1:
        raise ValueError(f"grid_thw holds {grid.min()}. Frames, rows and columns of patches are 1 or more.")
    frames, rows, columns = grid.T
    most_frames, most_rows, most_columns = (float(axis.max(initial=0)) for axis in grid.T)
    _refuse_overflow(most_frames * (most_rows * most_columns) ** 2 * len(grid), "grid_thw")

    patches = rows * columns  # patches of a frame
    in_windows = []
    for edge in dict.fromkeys(windows):
        squares = frames * _edge_squares(rows, edge) * _edge_squares(columns, edge)
        in_windows.append((edge, int(squares.sum())))
    return int((frames * patches).sum()), int((frames * patches * patches).sum()), tuple(in_windows)


def _grid(values: IntRows) -> IntArray:
    """Return the frames, rows and columns of images or videos, int64 ``[N, 3]``."""
    grid = host_ints(values, "grid_thw", ndim=None)
    if grid.size % 3 or (grid.ndim > 1 and grid.shape[-1] != 3):
        raise ValueError(
            f"grid_thw has shape {grid.shape}; wanted [N, 3]: frames, rows and columns of patches."
        )
    return grid.reshape(-1, 3)


def _edge_squares(patches: IntArray, edge: int) -> IntArray:
    """Cut ``patches`` into pieces of ``edge`` and sum their squares: 5 in pieces of 2 gives 4 + 4 + 1."""
    whole = patches // edge
    rest = patches % edge
    return whole * edge * edge + rest * rest


def _offset_rows(cu_seqlens: IntRows | None, name: str) -> list[list[int]]:
    """Return the offsets of every row; an empty list for None."""
    if cu_seqlens is None:
        return []
    offsets = host_ints(cu_seqlens, name, ndim=None)
    if offsets.ndim not in (1, 2):
        raise ValueError(f"{name} has shape {offsets.shape}. Pass [S + 1] or [rows, S + 1].")
    rows: list[list[int]] = np.atleast_2d(offsets).tolist()
    return rows


def _trim(row: list[int], argmin: int | Tensor | IntArray | None) -> list[int]:
    """Return offsets without a tail of -1 or 0; raise if they do not start at 0, or if they decrease."""
    if isinstance(argmin, Tensor | np.ndarray):  # Megatron stores it as a tensor of one number
        if math.prod(argmin.shape) != 1:
            raise ValueError(f"argmin is {described(argmin)}; wanted one number, of valid offsets.")
        argmin = int(argmin.item())
    if argmin is not None:
        argmin = whole_number(argmin, "argmin", least=None)
        if not 0 <= argmin <= len(row):
            raise ValueError(
                f"argmin={argmin} is outside the {len(row)} offsets. Pass the number of valid offsets."
            )
    offsets = row[:argmin] if argmin else list(row)

    # Offsets that are all 0 are empty sequences, not a tail.
    while len(offsets) > 1 and offsets[-1] in (-1, 0) and not all(value == 0 for value in offsets):
        offsets.pop()
    falls = any(start > stop for start, stop in pairwise(offsets))
    if falls or (offsets and offsets[0] != 0):
        raise ValueError(
            f"cu_seqlens {_short(row)} must start at 0 and never decrease, except for a tail of -1 or 0."
        )
    return offsets


def _dense_shape(shape: tuple[int, int] | None, row: list[int]) -> tuple[int, int]:
    """Return checked rows and row length; ``row`` is what described no sequence, for the message."""
    if shape is None:
        raise ValueError(
            f"cu_seqlens {_short(row)} describes no sequence. Pass shape=(rows, row length) of the tokens."
        )
    if len(shape) != 2:
        raise ValueError(f"shape={shape!r}; wanted two numbers, rows and row length.")
    return whole_number(shape[0], "shape"), whole_number(shape[1], "shape")


def _short(row: list[int]) -> str:
    """Format at most eight numbers for a message."""
    return f"{row[:8]}..." if len(row) > 8 else f"{row}"
