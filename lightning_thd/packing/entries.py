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
            host_ints(values[:1] if values.ndim == 1 else values, "lengths")  # raises with the reason
        return values if values.size else np.empty(0, np.int64)
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
    known = getattr(lengths, "summary", None)
    if isinstance(known, LengthSummary):
        if known.count != len(lengths):
            raise ValueError(
                f"lengths.summary is of {known.count} sequences, but there are {len(lengths)}. Make it again."
            )
        return known
    if not len(lengths):
        raise ValueError("lengths is empty: there is no sequence to pack. Pass the tokens of each sequence.")
    total, shortest, longest = 0, np.iinfo(np.int64).max, 0
    digest = hashlib.blake2b(digest_size=16)
    for start, values in blocks(lengths):
        low = int(values.argmin())
        if values[low] < 0:
            raise ValueError(f"Sequence {start + low} has {values[low]} tokens. A length is at least 0.")
        total += int(values.sum())
        shortest, longest = min(shortest, int(values[low])), max(longest, int(values.max()))
        digest.update(values.astype("<i8", copy=False).tobytes())
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
        return entries + np.searchsorted(self.left_out - np.arange(len(self.left_out)), entries, side="right")

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
    owner = np.repeat(np.arange(len(indices)), pieces)
    start = (np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * limit
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
    limit, most_patches = slots.longest, slots.patches
    bounded = media is not None and most_patches < UNBOUNDED
    counts = {"empty": 0, "dropped": 0, "truncated": 0, "split": 0, "own_pack": 0, "tokens_lost": 0}
    left_out: list[IntArray] = []
    if summary.longest > limit or summary.shortest < 1 or bounded:
        for start, values in blocks(lengths):
            empty, long = values < 1, values > limit
            if oversize == "error" and long.any():
                first = int(long.argmax())
                raise ValueError(
                    f"Sequence {start + first} has {values[first]} tokens but at most {limit} "
                    "fit a pack. Set oversize='truncate', 'split', 'drop' or 'own_pack', or raise capacity. "
                    "See docs/reference/messages.md#too-long."
                )
            counts["empty"] += int(empty.sum())
            _count_long(counts, values[long], limit, oversize)
            if bounded and media is not None:
                seen = media(np.arange(start, start + len(values)))[:, 0]
                wide = (seen > most_patches) & ~empty
                if oversize not in ("drop", "own_pack") and wide.any():
                    at = int(wide.argmax())
                    raise ValueError(too_many_patches(start + at, int(seen[at]), most_patches))
                _count_long(counts, values[wide & ~long], limit, oversize)
                long |= wide
            left_out.append(start + np.flatnonzero(empty | long if oversize == "drop" else empty))
    gone = np.concatenate(left_out) if left_out else np.empty(0, np.int64)
    if len(gone) == summary.count:
        raise ValueError(
            f"None of the {summary.count} sequences is left: {counts['empty']} are empty and "
            f"{counts['dropped']} are longer than the {limit} tokens that fit a pack, or have more than "
            "max_patches. Raise these limits, or set oversize='truncate' or 'split'."
        )
    return Entries(
        lengths=lengths,
        limit=limit,
        oversize=oversize,
        total=summary.count - len(gone),
        left_out=gone,
        counts=counts,
        media=media,
        evenly=evenly,
    )


def _count_long(counts: dict[str, int], long: IntArray, limit: int, oversize: Oversize) -> None:
    if oversize == "drop":
        counts["dropped"] += len(long)
        counts["tokens_lost"] += int(long.sum())
    elif oversize == "truncate":
        counts["truncated"] += len(long)
        counts["tokens_lost"] += int((long - limit).sum())
    elif oversize != "error":
        counts[oversize] += len(long)
