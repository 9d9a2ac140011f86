"""Lengths and the oversize policy -> the sequences of an epoch, and the spans of each sequence.

Lengths may be in a memory map or computed on demand: then they are read in blocks, never copied as a whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from lightning_thd._checks import host_ints
from lightning_thd._pages import see
from lightning_thd.packing.cost import Media
from lightning_thd.packing.lengths import UNBOUNDED, Slots, too_many_patches
from lightning_thd.packing.permutation import permute, spread
from lightning_thd.packing.plan import Spans

Oversize = Literal["error", "drop", "truncate", "split", "own_pack"]
IntArray = npt.NDArray[np.int64]

BLOCK = 1 << 20  # lengths read at a time: 8 MiB


@runtime_checkable
class VirtualLengths(Protocol):
    """Lengths that are computed on demand: ``len()``, and ``[positions]`` for an int64 array of positions."""

    def __len__(self) -> int: ...

    def __getitem__(self, positions: IntArray, /) -> npt.ArrayLike: ...


Lengths = npt.ArrayLike | Sequence[int] | VirtualLengths
OpenLengths = npt.NDArray[np.integer[Any]] | VirtualLengths


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthSummary:
    """Extremes, sum and hash of all lengths, from one pass over them."""

    count: int  # sequences
    total: int  # tokens of all sequences
    shortest: int  # tokens of the shortest sequence
    longest: int  # tokens of the longest sequence
    digest: str  # hexadecimal hash of all lengths in order, the same for every integer type


def open_lengths(lengths: Lengths) -> OpenLengths:
    """Convert lists and tensors to arrays; keep arrays, memory maps and virtual lengths as they are."""
    if hasattr(lengths, "__array__") or isinstance(lengths, list | tuple | range):
        values = np.asarray(lengths)
        if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
            # This raises with the reason. One value is enough to find it, and a memory map may be large.
            host_ints(values[:1] if values.ndim == 1 else values, "lengths")
        return values if values.size else np.empty(0, np.int64)  # an empty list becomes an array of floats
    if isinstance(lengths, VirtualLengths) and not isinstance(lengths, str | bytes | Mapping):
        return lengths
    raise ValueError(f"lengths is a {type(lengths).__name__}. Pass an array of ints, or a VirtualLengths.")


def read_lengths(lengths: OpenLengths, positions: IntArray) -> IntArray:
    """Read the lengths at some positions as int64, and check the values that virtual lengths return."""
    values = np.asarray(lengths[positions])
    if values.shape != positions.shape or values.dtype.kind not in "iu":
        raise ValueError(
            f"lengths[...] answered {len(positions)} positions with {values.dtype} {values.shape}. "
            "It must return one int for each."
        )
    return values.astype(np.int64, copy=False)


def blocks(lengths: OpenLengths) -> Iterator[tuple[int, IntArray]]:
    """Yield all lengths in order as blocks: the first position and the int64 values."""
    for start in range(0, len(lengths), BLOCK):
        stop = min(start + BLOCK, len(lengths))
        if isinstance(lengths, np.ndarray):
            yield start, np.asarray(lengths[start:stop]).astype(np.int64, copy=False)
        else:
            yield start, read_lengths(lengths, np.arange(start, stop))


def summarize(lengths: OpenLengths) -> LengthSummary:
    """Return extremes, sum and hash of all lengths, from ``lengths.summary`` or by reading them once."""
    stored = getattr(lengths, "summary", None)
    if isinstance(stored, LengthSummary):
        if stored.count != len(lengths):
            raise ValueError(
                f"lengths.summary is of {stored.count} sequences, but there are {len(lengths)}. "
                "Make it again."
            )
        return stored
    if not len(lengths):
        raise ValueError("lengths is empty: there is no sequence to pack. Pass the tokens of each sequence.")

    total = 0
    shortest = np.iinfo(np.int64).max
    longest = 0
    digest = hashlib.blake2b(digest_size=16)
    for start, values in blocks(lengths):
        lowest = int(values.argmin())
        if values[lowest] < 0:
            raise ValueError(
                f"Sequence {start + lowest} has {values[lowest]} tokens. A length is at least 0."
            )
        total += int(values.sum())
        shortest = min(shortest, int(values[lowest]))
        longest = max(longest, int(values.max()))
        digest.update(values.astype("<i8", copy=False).tobytes())  # the same bytes on every machine
    return LengthSummary(
        count=len(lengths), total=total, shortest=shortest, longest=longest, digest=digest.hexdigest()
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Entries:
    """The sequences that take part in an epoch, numbered without gaps."""

    lengths: OpenLengths
    limit: int  # longest piece that fits a pack, in real tokens
    oversize: Oversize
    total: int  # number of entries: all sequences except those left out
    left_out: IntArray  # dataset indices of empty and dropped sequences, ascending
    counts: dict[str, int]  # sequences that are empty, dropped, truncated and so on, and the tokens lost
    media: Media | None = None
    evenly: bool = False  # whether a step or window takes entries at equal distances; see ``spread``

    def patches(self, spans: Spans) -> IntArray | None:
        """Return the image patches of the sequence of each piece, int64 ``[S]``; None if all data is text."""
        return None if self.media is None else self.media(spans.index)[:, 0]

    def drawn(self, positions: IntArray, size: int, key: int) -> IntArray:
        """Return the dataset indices at positions of a shuffle; a step or window has ``size`` positions."""
        if self.evenly:
            return self.indices(spread(positions, self.total, size, key=key))
        return self.indices(permute(positions, self.total, key=key))

    def indices(self, entries: IntArray) -> IntArray:
        """Convert indices of entries to dataset indices, skipping sequences that are left out."""
        if not len(self.left_out):
            return entries
        # The entries before each sequence that is left out; an entry skips all such sequences before it.
        entries_before = self.left_out - np.arange(len(self.left_out))
        return entries + np.searchsorted(entries_before, entries, side="right")

    def spans(self, indices: IntArray) -> Spans:
        """Return the pieces of the sequences ``indices``, in order; only a split sequence has several."""
        lengths = read_lengths(self.lengths, indices)
        bad = (lengths < 1) | ((lengths > self.limit) & (self.oversize in ("error", "drop")))
        if bad.any():
            raise ValueError(
                f"The lengths changed: sequence {indices[bad][0]} is empty or too long. Make a new planner."
            )
        if self.oversize == "split":
            return _split(indices, lengths, self.limit)
        if self.oversize == "truncate":
            lengths = np.minimum(lengths, self.limit)
        zeros = np.zeros(len(indices), np.int64)
        return Spans(index=indices, start=zeros, stop=lengths, continued=zeros.astype(bool))


def _split(indices: IntArray, lengths: IntArray, limit: int) -> Spans:
    """Cut sequences into pieces of at most ``limit`` tokens: 7 tokens at limit 3 become 3, 3, 1."""
    pieces = -(-lengths // limit)
    owner = np.repeat(np.arange(len(indices)), pieces)  # the sequence of each piece
    first_piece = np.cumsum(pieces) - pieces
    start = (np.arange(len(owner)) - np.repeat(first_piece, pieces)) * limit
    stop = np.minimum(start + limit, lengths[owner])
    return Spans(index=indices[owner], start=start, stop=stop, continued=stop < lengths[owner])


def make_entries(
    lengths: OpenLengths,
    summary: LengthSummary,
    slots: Slots,
    *,
    oversize: Oversize,
    media: Media | None = None,
    evenly: bool = False,
) -> Entries:
    """Apply the oversize policy to lengths, and count the sequences that it changes or leaves out."""
    limit = slots.longest
    counted_media = media if slots.patches < UNBOUNDED else None  # whose patches must be compared
    counts = {"empty": 0, "dropped": 0, "truncated": 0, "split": 0, "own_pack": 0, "tokens_lost": 0}
    left_out = np.empty(0, np.int64)

    # The summary tells whether the policy touches any sequence; if not, lengths are not read again.
    if summary.longest > limit or summary.shortest < 1 or counted_media is not None:
        parts = [
            _apply_policy(counts, start, values, slots, oversize, counted_media)
            for start, values in blocks(lengths)
        ]
        left_out = np.concatenate([left_out, *parts])

    if len(left_out) == summary.count:
        raise ValueError(
            f"None of the {summary.count} sequences is left: {counts['empty']} are empty and "
            f"{counts['dropped']} are longer than the {limit} tokens that fit a pack, or have more than "
            "max_patches. Raise these limits, or set oversize='truncate' or 'split'."
        )

    return Entries(
        lengths=lengths,
        limit=limit,
        oversize=oversize,
        total=summary.count - len(left_out),
        left_out=left_out,
        counts=counts,
        media=media,
        evenly=evenly,
    )


def _apply_policy(
    counts: dict[str, int],
    start: int,
    values: IntArray,
    slots: Slots,
    oversize: Oversize,
    media: Media | None,
) -> IntArray:
    """Add a block's sequences to ``counts``; return the dataset indices of those that are left out.

    ``start`` is the index of the block's first sequence. ``media`` is None if patches need no comparison.
    """
    limit = slots.longest
    empty = values < 1
    too_long = values > limit
    if oversize == "error" and too_long.any():
        first = int(too_long.argmax())
        raise ValueError(
            f"Sequence {start + first} has {values[first]} tokens but at most {limit} "
            "fit a pack. Set oversize='truncate', 'split', 'drop' or 'own_pack', or raise capacity. "
            f"{see('too-long')}"
        )
    counts["empty"] += int(empty.sum())
    _count_oversize(counts, values[too_long], limit, oversize)

    oversized = too_long
    if media is not None:
        patches = media(np.arange(start, start + len(values)))[:, 0]
        too_wide = (patches > slots.patches) & ~empty
        if oversize not in ("drop", "own_pack") and too_wide.any():  # an image cannot be cut
            first = int(too_wide.argmax())
            raise ValueError(too_many_patches(start + first, int(patches[first]), slots.patches))
        _count_oversize(counts, values[too_wide & ~too_long], limit, oversize)
        oversized = too_long | too_wide

    gone = empty | oversized if oversize == "drop" else empty
    return start + np.flatnonzero(gone)


def _count_oversize(counts: dict[str, int], lengths: IntArray, limit: int, oversize: Oversize) -> None:
    """Add the sequences that do not fit a pack, given by their lengths, to ``counts``."""
    if oversize == "drop":
        counts["dropped"] += len(lengths)
        counts["tokens_lost"] += int(lengths.sum())
    elif oversize == "truncate":
        counts["truncated"] += len(lengths)
        counts["tokens_lost"] += int((lengths - limit).sum())
    elif oversize != "error":
        counts[oversize] += len(lengths)
