"""Sequence lengths or cu_seqlens on the host -> SeqStats: counts of a batch, in host integers.

FLOPs are linear in these integers, so they can be added over microbatches, steps and ranks first and
turned into FLOPs once, by ``flops.FlopsModel``. Nothing here is a tensor: building them on the host
costs microseconds and no device read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from lightning_thd._checks import described, whole_number
from lightning_thd.stats import counts
from lightning_thd.stats.counts import IntRows, Ints, Window


@dataclass(frozen=True, kw_only=True, slots=True)
class SeqStats:
    """Counts of one or more batches, as host integers that add with ``+`` and ``sum``.

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
        """Return the windows whose pairs were counted."""
        return tuple(window for window, _ in self.window_pairs)

    def merged_patches(self, merge_size: int = 2) -> int:
        """Count image tokens the text model sees: patches merged ``merge_size`` x ``merge_size`` into one."""
        merge_size = whole_number(merge_size, "merge_size", least=1)
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
        lengths = counts.int64(lengths, "lengths")
        real_tokens, sequences, sum_squares, lowest = counts.sums(lengths)
        if lowest < 0:
            raise ValueError(
                f"lengths holds {lowest}. A sequence has zero or more tokens: pass real lengths."
            )
        slots = real_tokens if slots is None else whole_number(slots, "slots", least=None)
        loss_tokens = (
            real_tokens - sequences
            if loss_tokens is None
            else whole_number(loss_tokens, "loss_tokens", least=None)
        )
        if slots < real_tokens:
            raise ValueError(
                f"slots={slots} is less than the {real_tokens} real tokens of the sequences. "
                "Slots include the padding: leave slots out when nothing is padded."
            )
        if not 0 <= loss_tokens <= slots:
            raise ValueError(
                f"loss_tokens={loss_tokens} is outside 0..{slots} slots. Count targets that are >= 0."
            )
        pairs = tuple((window, counts.pairs(lengths, window, counts.total)) for window in _tuple(windows))
        cross_tokens, cross_pairs = (0, 0) if cross_lengths is None else counts.cross(lengths, cross_lengths)
        patches, squares, in_windows = counts.vision(image_grid_thw, video_grid_thw, _edges(vision_windows))
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
        padded = [] if cu_seqlens is None else counts.rows_of(cu_seqlens, "cu_seqlens")
        unpadded = (
            [] if cu_seqlens_unpadded is None else counts.rows_of(cu_seqlens_unpadded, "cu_seqlens_unpadded")
        )
        rows = [counts.trim(row, argmin) for row in (unpadded or padded or [[]])]
        if len(rows) == 1 and len(rows[0]) < 2:
            row_count, row_length = counts.dense_shape(shape, rows[0])
            lengths = [row_length] * row_count
        else:
            lengths = []
            for row in rows:
                dense = len(row) < 2
                lengths += [counts.dense_shape(shape, row)[1]] if dense else np.diff(row).tolist()
        held = sum(max(row, default=0) for row in padded)
        given = 0 if shape is None else math.prod(counts.dense_shape(shape, []))
        slots = max(given, held, sum(lengths))
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


def _tuple(windows: Iterable[Window]) -> tuple[Window, ...]:
    if not isinstance(windows, Iterable) or isinstance(windows, str | bytes):
        raise TypeError(f"windows is {described(windows)}; wanted a tuple of windows, FlopsModel.windows.")
    return tuple(windows)


def _edges(windows: Iterable[int]) -> tuple[int, ...]:
    advice = "Pass FlopsModel.vision_windows."
    return tuple(whole_number(edge, "A vision window", least=1, advice=advice) for edge in _tuple(windows))


def combine(stats: Sequence[SeqStats]) -> SeqStats:
    """Add many ``SeqStats`` at once.

    Args:
        stats: batches counted with the same windows; a batch of no tokens may lack them.

    Returns:
        The sums; of nothing, zeros.
    """
    stats = list(stats) if isinstance(stats, Iterable) else [stats]
    for one in stats:
        if not isinstance(one, SeqStats):
            raise TypeError(f"combine() got {described(one)}; wanted SeqStats. Pass a list of batch.stats.")
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
    """Sum the pair counts of each window; raise if a nonempty batch lacks one of the windows."""
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
