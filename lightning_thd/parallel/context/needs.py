"""A layout and a window -> the keys that each rank needs from the other ranks, and its kernel calls on them.

``plan_exchange`` brings a rank all keys that its queries see, before any kernel call. ``plan_block`` plans
one call per source rank, and the results are merged. A ring uses it to hold few keys at a time. A striped
layout always needs it: a kernel's causal mask moves by one key per query, and a rank's neighbouring queries
are ``cp`` slots apart. So the keys of a call must be ``cp`` slots apart too, all from one source.
Legend: T slots of a pack, P sequences of a kernel call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from lightning_thd.alignment import Layout
from lightning_thd.boundaries import KernelCall
from lightning_thd.parallel.context import partition
from lightning_thd.parallel.context.layout import ShardLayout, offsets_of
from lightning_thd.parallel.context.partition import Ints, ranges


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A kernel call of one rank's queries on the keys of a source rank, perhaps itself; arrays are int64."""

    q_rows: Ints | None  # rows of the rank's shard that see any of the keys; None is all rows
    q_lengths: Ints  # ``[P]``, queries of each sequence of the call
    kv_rows: Ints  # rows of the source's shard, sequence after sequence; some may occur twice
    kv_lengths: Ints  # ``[P]``, keys of each sequence of the call, at least 1
    left: int  # keys that a query sees before its own place, -1 for all; last key and last query are aligned
    right: int  # keys that a query sees after its own place: 0 is causal, -1 is all


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
    """Plan the call of a rank's queries on the keys of ``source``; None if the queries see none of them."""
    if layout == "striped":
        return _striped_block(padded_lengths, cp, rank, source, causal=causal, left=left)

    # The distance between the rank's queries and the source's keys differs from sequence to sequence, but a
    # kernel call has only one window.
    assert left < 0, "a window needs the striped partition"
    q_lengths, visible, first = _visible(padded_lengths, cp, rank, source, layout, causal=causal)
    right = 0 if causal and rank == source else -1
    first_rows = partition.firsts_of(q_lengths)
    slots = int(q_lengths.sum())
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
    """List the rows of ``source``'s shard whose keys a rank's queries see: int64, ascending and unique."""
    if layout == "striped" or left < 0:
        block = plan_block(
            padded_lengths, cp=cp, rank=rank, source=source, layout=layout, causal=causal, left=left
        )
        if block is None:
            return np.empty(0, np.int64)
        return _unique(block.kv_rows)

    is_seen = _seen(padded_lengths, cp, rank, layout, causal=causal, left=left)
    slots_of_source = partition.rank_indices(padded_lengths, cp=cp, rank=source, layout=layout)
    return np.flatnonzero(is_seen[slots_of_source])


def _unique(rows: Ints) -> Ints:
    """Return the rows in ascending order, each once."""
    marked = np.zeros(int(rows.max(initial=-1)) + 1, dtype=bool)  # faster than a sort
    marked[rows] = True
    return np.flatnonzero(marked)


class Exchange(NamedTuple):
    """The rows that one rank sends and receives, after which it has every key that its queries see."""

    send_rows: Any  # int64 rows of this rank's shard, those for rank 0 first; ``exchanged`` uploads them
    send_counts: list[int]  # rows for every rank, 0 for itself
    receive_counts: list[int]  # rows from every rank, 0 from itself
    group_rows: int  # rows that all ranks receive in total; 0 if no rank needs a key of another
    row_of_slot: (
        Ints  # ``[T]``, each slot's row in this shard followed by the received rows; -1 if in neither
    )


def plan_exchange(
    padded_lengths: Sequence[int], *, cp: int, rank: int, layout: Layout, causal: bool = True, left: int = -1
) -> Exchange:
    """Plan the exchange after which every rank holds its own keys and all keys that its queries see."""
    options: dict[str, Any] = {"cp": cp, "layout": layout, "causal": causal, "left": left}
    counts = need_counts(padded_lengths, **options)
    others = [other for other in range(cp) if other != rank]
    sent = [needed_rows(padded_lengths, rank=other, source=rank, **options) for other in others]
    slots_of = [partition.rank_indices(padded_lengths, cp=cp, rank=r, layout=layout) for r in range(cp)]

    row_of_slot = np.full(sum(map(len, slots_of)), -1, dtype=np.int64)
    row_of_slot[slots_of[rank]] = np.arange(len(slots_of[rank]))
    next_row = len(slots_of[rank])

    for other in others:
        rows = needed_rows(padded_lengths, rank=rank, source=other, **options)
        row_of_slot[slots_of[other][rows]] = np.arange(next_row, next_row + len(rows))
        next_row += len(rows)

    return Exchange(
        send_rows=np.concatenate([np.empty(0, np.int64), *sent]),
        send_counts=counts[:, rank].tolist(),
        receive_counts=counts[rank].tolist(),
        group_rows=int(counts.sum()),
        row_of_slot=row_of_slot,
    )


def need_counts(
    padded_lengths: Sequence[int], *, cp: int, layout: Layout, causal: bool = True, left: int = -1
) -> Ints:
    """Count the rows that rank r needs from rank s, int64 ``[cp, cp]`` at ``[r, s]``."""
    counts = np.zeros((cp, cp), dtype=np.int64)
    owner = np.empty(int(np.sum(padded_lengths)), dtype=np.int64)
    for rank in range(cp):
        owner[partition.rank_indices(padded_lengths, cp=cp, rank=rank, layout=layout)] = rank

    options: dict[str, Any] = {"layout": layout, "causal": causal, "left": left}
    for rank in range(cp):
        if layout == "striped":
            rows = [needed_rows(padded_lengths, cp=cp, rank=rank, source=s, **options) for s in range(cp)]
            counts[rank] = list(map(len, rows))
        else:
            counts[rank] = np.bincount(owner[_seen(padded_lengths, cp, rank, **options)], minlength=cp)

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
    """Return, per sequence of a call, the numbers of queries and visible keys, and the first key's row."""
    source_lengths = partition.held_lengths(padded_lengths, cp=cp, rank=source, layout=layout)
    first = partition.firsts_of(source_lengths)
    if rank == source:
        return source_lengths, source_lengths, first
    if not causal:
        q_lengths = partition.held_lengths(padded_lengths, cp=cp, rank=rank, layout=layout)
        return q_lengths, source_lengths, first

    queries = partition.pieces_of_rank(padded_lengths, cp=cp, rank=rank, layout=layout)
    keys = partition.pieces_of_rank(padded_lengths, cp=cp, rank=source, layout=layout)
    # Pieces of two ranks never overlap, so queries see the whole of every source piece that begins earlier.
    stride = int(max(padded_lengths, default=0)) + 1
    earlier = np.searchsorted(keys.sequence * stride + keys.start, queries.sequence * stride + queries.start)
    keys_until = np.concatenate([[0], np.cumsum(keys.lengths)])
    visible = keys_until[earlier] - first[queries.sequence]

    # Pieces that see the same keys as the piece before them are joined to one sequence of the call.
    joins = np.zeros(len(visible), dtype=bool)
    joins[1:] = (np.diff(queries.sequence) == 0) & (np.diff(visible) == 0)
    sequence_of_call = np.cumsum(~joins) - 1
    lengths = np.bincount(sequence_of_call, queries.lengths, minlength=0).astype(np.int64)
    return lengths, visible[~joins], first[queries.sequence[~joins]]


def _striped_block(
    padded_lengths: Sequence[int], cp: int, rank: int, source: int, *, causal: bool, left: int
) -> Block | None:
    """Plan a block of a striped partition; all its rows are ``cp`` slots apart, so it can have a window."""
    q_first, q_stop = partition.striped_rows(padded_lengths, cp=cp, rank=rank)
    k_first, k_stop = partition.striped_rows(padded_lengths, cp=cp, rank=source)
    left_rows = -1  # the window of the call, in rows of the shard
    right_rows = -1
    if causal:
        later = int(source > rank)  # 1 if the source's row i is after this rank's row i, so hidden from it
        k_stop = np.maximum(q_stop - later, k_first)
        right_rows = 0
        if left >= 0:
            left_rows = (left + source - rank) // cp - later
            if left_rows < 0:
                return None
            k_first = np.maximum(k_first, np.minimum(q_first - later - left_rows, k_stop))

    slots = int(np.sum(padded_lengths)) // cp
    return _block(q_first, q_stop - q_first, k_first, k_stop - k_first, left_rows, right_rows, slots)


def _block(
    q_first: Ints, q_lengths: Ints, k_first: Ints, kv_lengths: Ints, left: int, right: int, slots: int
) -> Block | None:
    """Build a block without the sequences that have no query or no key; None if no sequence is left."""
    takes_part = (q_lengths > 0) & (kv_lengths > 0)
    if not takes_part.any():
        return None

    q_first = q_first[takes_part]
    q_lengths = q_lengths[takes_part]
    k_first = k_first[takes_part]
    kv_lengths = kv_lengths[takes_part]
    q_rows = ranges(q_first, q_first + q_lengths)
    return Block(
        q_rows=None if len(q_rows) == slots else q_rows,
        q_lengths=q_lengths,
        kv_rows=ranges(k_first, k_first + kv_lengths),
        kv_lengths=kv_lengths,
        left=left,
        right=right,
    )


class BlockCall(NamedTuple):
    """The kernel call of a ``Block``, whose ``q_rows``, ``left`` and ``right`` it keeps."""

    q_rows: Tensor | None
    keys: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    max_seqlen_q: int
    max_seqlen_kv: int
    left: int
    right: int


class RingStep(NamedTuple):
    """A step of the ring: keys sent and received, and the call on the received (in step 0, own) keys."""

    to: int  # the rank that gets keys from this one
    source: int  # the rank whose keys this rank gets
    send_rows: Any  # int64 rows of this rank's shard; ``ring_steps`` uploads them
    receive_count: int
    call: BlockCall | None  # None if no query of this rank sees the keys


def exchanged(shard: ShardLayout, *, causal: bool, left: int) -> Exchange:
    """Return the exchange that brings the other ranks' keys, computed once per batch and kind of layer."""

    def make() -> Exchange:
        options: dict[str, Any] = {**shard.cut, "causal": causal, "left": left}
        plan = plan_exchange(shard.padded_lengths, rank=shard.rank, **options)
        return plan._replace(send_rows=shard.put(plan.send_rows))

    return shard.once(("exchange", causal, left), make)


def needed_call(shard: ShardLayout, *, causal: bool, left: int) -> KernelCall:
    """Return the kernel call on this rank's keys, followed by the keys that ``exchanged`` brings."""

    def make() -> KernelCall:
        row_of_slot = exchanged(shard, causal=causal, left=left).row_of_slot
        return shard.make_call(row_of_slot, causal=causal, left=left)

    return shard.once(("needed call", causal, left), make)


def block_calls(shard: ShardLayout, *, causal: bool, left: int, gathered: bool) -> list[BlockCall]:
    """Return a call per source rank with visible keys, ``gathered`` from all ranks or ``exchanged``."""

    def make() -> list[BlockCall]:
        calls = []
        slots = shard.local_slots
        options: dict[str, Any] = {**shard.cut, "causal": causal, "left": left}
        row_of_slot: Ints | None = None
        if not gathered:
            row_of_slot = exchanged(shard, causal=causal, left=left).row_of_slot

        for source in range(shard.cp):
            block = plan_block(shard.padded_lengths, rank=shard.rank, source=source, **options)
            if block is None:
                continue
            if row_of_slot is None:
                rows: Ints = np.arange(source * slots, (source + 1) * slots)
            else:
                rows = row_of_slot[partition.rank_indices(shard.padded_lengths, **shard.cut, rank=source)]
            calls.append(_block_call(block, rows))

        uploaded_calls: list[BlockCall] = shard.put(calls)
        return uploaded_calls

    return shard.once(("blocks", causal, left, gathered), make)


def ring_steps(shard: ShardLayout, *, causal: bool, left: int) -> list[RingStep]:
    """Return the ring's steps; step d receives the keys of rank ``rank - d``, step 0 nothing."""

    def make() -> list[RingStep]:
        steps: list[RingStep] = shard.put([_ring_step(shard, d, causal, left) for d in range(shard.cp)])
        return steps

    return shard.once(("ring", causal, left), make)


def _ring_step(shard: ShardLayout, distance: int, causal: bool, left: int) -> RingStep:
    """Plan the step in which keys come from the rank ``distance`` before this one; arrays are on the host."""
    to = (shard.rank + distance) % shard.cp
    source = (shard.rank - distance) % shard.cp
    options: dict[str, Any] = {**shard.cut, "causal": causal, "left": left}
    block = plan_block(shard.padded_lengths, rank=shard.rank, source=source, **options)
    row_of_key: Ints = np.arange(shard.local_slots)
    sent = np.empty(0, np.int64)
    received = np.empty(0, np.int64)
    if distance:
        sent = needed_rows(shard.padded_lengths, rank=to, source=shard.rank, **options)
        received = needed_rows(shard.padded_lengths, rank=shard.rank, source=source, **options)
        row_of_key[received] = np.arange(len(received))

    call = None if block is None else _block_call(block, row_of_key)
    return RingStep(to, source, sent, len(received), call)


def _block_call(block: Block, row_of_key: Ints) -> BlockCall:
    """Return a block's call as host arrays, which are uploaded together."""
    q_rows: Any = block.q_rows
    keys: Any = row_of_key[block.kv_rows]
    cu_seqlens_q: Any = offsets_of(block.q_lengths)
    cu_seqlens_kv: Any = offsets_of(block.kv_lengths)
    return BlockCall(
        q_rows,
        keys,
        cu_seqlens_q,
        cu_seqlens_kv,
        int(block.q_lengths.max()),
        int(block.kv_lengths.max()),
        block.left,
        block.right,
    )
