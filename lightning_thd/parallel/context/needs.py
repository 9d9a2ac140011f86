"""Padded lengths of a pack, ranks, a partition -> the keys that each rank needs of each other, and no more.

Two uses of the same needs. ``plan_exchange`` brings all of them in one exchange, for one call of a kernel a
rank. ``plan_block`` cuts attention into one call for every rank that keys come from, whose partial results
are merged: no rank ever holds more than one other rank's keys. Under the striped partition only the second
exists, as a rank's queries stand ``cp`` slots apart.

Pure: host integers in, numpy arrays out, the same on every rank.

Legend: N slots of a shard, P pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_thd.alignment import Layout
from lightning_thd.parallel.context import partition
from lightning_thd.parallel.context.partition import Ints, ranges


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A kernel call of one rank's queries on another rank's keys.

    Attributes:
        q_rows: int64, rows of the rank's shard that see any of them; None is all rows.
        q_lengths: int64 ``[P]``, queries of each sequence of the call.
        kv_rows: int64, rows of the source's shard, sequence after sequence; some may stand there twice.
        kv_lengths: int64 ``[P]``, keys of each sequence of the call, at least 1.
        left: keys before its own that a query sees, -1 for all, where the last key stands at the last query.
        right: 0 is causal, -1 is all keys.
    """

    q_rows: Ints | None
    q_lengths: Ints
    kv_rows: Ints
    kv_lengths: Ints
    left: int
    right: int


def plan_block(
    padded_lengths: Sequence[int],
    *,
    cp: int,
    rank: int,
    source: int,
    layout: Layout,
    causal: bool = True,
    left: int = -1,
) -> Block | None:
    """Plan the call of a rank's queries on the keys that ``source`` holds.

    Args:
        padded_lengths: slots of every sequence, a trailing pad included.
        cp: context-parallel ranks.
        rank: whose queries.
        source: whose keys.
        layout: see ``partition.pieces_of_rank``.
        causal: queries see no later key.
        left: keys before its own that a query sees, -1 for all; only under ``striped``, as elsewhere the
            distance of two pieces differs from sequence to sequence and no single call could express it.

    Returns:
        The call, or None where no query sees any of the keys. ``([8], cp=2, rank=1, source=0,
        layout="contiguous")`` has 4 queries on 4 keys, all of which they see.
    """
    if layout == "striped":
        return _striped_block(padded_lengths, cp, rank, source, causal=causal, left=left)
    assert left < 0, "a window needs the striped partition"
    q_lengths, visible, first = _visible(padded_lengths, cp, rank, source, layout, causal=causal)
    right = 0 if causal and rank == source else -1
    first_rows, slots = partition.firsts_of(q_lengths), int(q_lengths.sum())
    return _block(first_rows, q_lengths, first, visible, -1, right, slots)


def needed_rows(
    padded_lengths: Sequence[int],
    *,
    cp: int,
    rank: int,
    source: int,
    layout: Layout,
    causal: bool = True,
    left: int = -1,
) -> Ints:
    """List the rows of ``source``'s shard whose keys a rank's queries see.

    Returns:
        int64, ascending, none twice. ``([8], cp=2, rank=1, source=0, layout="contiguous", left=1)`` is
        ``[3]``: the window of the first query there reaches back by one.
    """
    if layout == "striped" or left < 0:
        block = plan_block(
            padded_lengths, cp=cp, rank=rank, source=source, layout=layout, causal=causal, left=left
        )
        return np.empty(0, np.int64) if block is None else _unique(block.kv_rows)
    seen = _seen(padded_lengths, cp, rank, layout, causal=causal, left=left)
    own = partition.rank_indices(padded_lengths, cp=cp, rank=source, layout=layout)
    return np.flatnonzero(seen[own])


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """The rows that one rank sends and receives so that its queries find every key they see.

    Attributes:
        send_rows: int64, rows of its shard, those for rank 0 first; a row may be sent to several.
        send_counts: rows for every rank, 0 for itself.
        receive_counts: rows from every rank, 0 from itself.
        group_rows: rows that all ranks together receive; 0 where nobody needs to exchange anything.
        most_rows: rows that the rank with the most receives or sends.
    """

    send_rows: Ints
    send_counts: list[int]
    receive_counts: list[int]
    group_rows: int
    most_rows: int


def plan_exchange(
    padded_lengths: Sequence[int], *, cp: int, rank: int, layout: Layout, causal: bool = True, left: int = -1
) -> tuple[Exchange, Ints]:
    """Plan the one exchange after which every rank holds its own keys and all it needs, as ``plan_keys``.

    Returns:
        The exchange, and int64 ``[T]``: where each slot of the pack lies in the rank's own rows followed by
        those received; -1 where it did not come.
    """
    counts = need_counts(padded_lengths, cp=cp, layout=layout, causal=causal, left=left)
    options = {"cp": cp, "layout": layout, "causal": causal, "left": left}
    sent = [
        needed_rows(padded_lengths, rank=other, source=rank, **options)  # type: ignore[arg-type]
        for other in range(cp)
        if other != rank
    ]
    owned = [partition.rank_indices(padded_lengths, cp=cp, rank=r, layout=layout) for r in range(cp)]
    where = np.full(sum(map(len, owned)), -1, dtype=np.int64)
    where[owned[rank]] = np.arange(len(owned[rank]))
    at = len(owned[rank])
    for other in range(cp):
        if other != rank and counts[rank, other]:
            rows = needed_rows(padded_lengths, rank=rank, source=other, **options)  # type: ignore[arg-type]
            where[owned[other][rows]] = np.arange(at, at + len(rows))
            at += len(rows)
    exchange = Exchange(
        send_rows=np.concatenate([np.empty(0, np.int64), *sent]),
        send_counts=counts[:, rank].tolist(),
        receive_counts=counts[rank].tolist(),
        group_rows=int(counts.sum()),
        most_rows=int(max(counts.sum(0).max(), counts.sum(1).max())),
    )
    return exchange, where


def need_counts(
    padded_lengths: Sequence[int], *, cp: int, layout: Layout, causal: bool = True, left: int = -1
) -> Ints:
    """Count the rows that each rank needs from each other rank.

    Returns:
        int64 ``[cp, cp]``: entry ``[r, s]`` counts what rank r needs of rank s, 0 where they are the same.
        ``[8]`` over 2 contiguous ranks is ``[[0, 0], [4, 0]]``.
    """
    counts = np.zeros((cp, cp), dtype=np.int64)
    owner = np.empty(int(np.sum(padded_lengths)), dtype=np.int64)
    if layout != "striped":
        for rank in range(cp):
            owner[partition.rank_indices(padded_lengths, cp=cp, rank=rank, layout=layout)] = rank
    for rank in range(cp):
        if layout != "striped":
            seen = _seen(padded_lengths, cp, rank, layout, causal=causal, left=left)
            counts[rank] = np.bincount(owner[seen], minlength=cp)
            continue
        for source in range(cp):
            rows = needed_rows(
                padded_lengths, cp=cp, rank=rank, source=source, layout=layout, causal=causal, left=left
            )
            counts[rank, source] = len(rows)
    np.fill_diagonal(counts, 0)
    return counts


def _seen(
    padded_lengths: Sequence[int], cp: int, rank: int, layout: Layout, *, causal: bool, left: int
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Mark the slots of the pack whose keys a rank's queries see, in O(T)."""
    start, stop = partition.key_spans(
        padded_lengths, cp=cp, rank=rank, layout=layout, causal=causal, left=left
    )
    total = int(np.sum(padded_lengths))
    depth = np.bincount(start, minlength=total + 1) - np.bincount(stop, minlength=total + 1)
    marked: np.ndarray[tuple[int], np.dtype[np.bool_]] = np.cumsum(depth[:total]) > 0
    return marked


def _visible(
    padded_lengths: Sequence[int], cp: int, rank: int, source: int, layout: Layout, *, causal: bool
) -> tuple[Ints, Ints, Ints]:
    """Return queries per call, keys of the source they see, and the first such key's row."""
    held = partition.held_lengths(padded_lengths, cp=cp, rank=source, layout=layout)
    first = partition.firsts_of(held)
    if rank == source:
        return held, held, first
    if not causal:
        return partition.held_lengths(padded_lengths, cp=cp, rank=rank, layout=layout), held, first
    queries = partition.pieces_of_rank(padded_lengths, cp=cp, rank=rank, layout=layout)
    keys = partition.pieces_of_rank(padded_lengths, cp=cp, rank=source, layout=layout)
    # Pieces of two ranks never overlap: those of the source that begin earlier are seen whole.
    stride = int(max(padded_lengths, default=0)) + 1
    place = np.searchsorted(keys.sequence * stride + keys.start, queries.sequence * stride + queries.start)
    before = np.concatenate([[0], np.cumsum(keys.lengths)])
    visible = before[place] - first[queries.sequence]
    same = np.zeros(len(visible), dtype=bool)  # as the piece before it: one call for both
    same[1:] = (np.diff(queries.sequence) == 0) & (np.diff(visible) == 0)
    call = np.cumsum(~same) - 1
    lengths = np.bincount(call, queries.lengths, minlength=0).astype(np.int64)
    return lengths, visible[~same], first[queries.sequence[~same]]


def _striped_block(
    padded_lengths: Sequence[int], cp: int, rank: int, source: int, *, causal: bool, left: int
) -> Block | None:
    """Return the kernel call of a striped shard's queries on another rank's keys, or None without any."""
    q_first, q_stop = partition.striped_rows(padded_lengths, cp=cp, rank=rank)
    k_first, k_stop = partition.striped_rows(padded_lengths, cp=cp, rank=source)
    own_left, own_right = -1, -1
    if causal:
        later = int(source > rank)  # its row of the same number is hidden
        k_stop = np.maximum(q_stop - later, k_first)
        own_right = 0
        if left >= 0:
            own_left = (left + source - rank) // cp - later
            if own_left < 0:
                return None
            k_first = np.maximum(k_first, np.minimum(q_first - later - own_left, k_stop))
    slots = int(np.sum(padded_lengths)) // cp
    return _block(q_first, q_stop - q_first, k_first, k_stop - k_first, own_left, own_right, slots)


def _block(
    q_first: Ints, q_lengths: Ints, k_first: Ints, kv_lengths: Ints, left: int, right: int, slots: int
) -> Block | None:
    kept = (q_lengths > 0) & (kv_lengths > 0)
    if not kept.any():
        return None
    q_rows = ranges(q_first[kept], (q_first + q_lengths)[kept])
    return Block(
        q_rows=None if len(q_rows) == slots else q_rows,
        q_lengths=q_lengths[kept],
        kv_rows=ranges(k_first[kept], (k_first + kv_lengths)[kept]),
        kv_lengths=kv_lengths[kept],
        left=left,
        right=right,
    )


def _unique(rows: Ints) -> Ints:
    marked = np.zeros(int(rows.max(initial=-1)) + 1, dtype=bool)
    marked[rows] = True
    return np.flatnonzero(marked)
