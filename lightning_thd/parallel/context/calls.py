"""A layout, a window -> the exchanges and kernel calls of context-parallel attention, on the device.

Each is worked out once a batch and kind of layer, and kept by the layout: all layers of a kind share it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from lightning_thd.parallel.context import needs, partition
from lightning_thd.parallel.context.layout import Call, ShardLayout, offsets_of
from lightning_thd.parallel.context.partition import Ints


class Exchanged(NamedTuple):
    """One exchange of the keys that ranks need of each other, as indices on the device.

    ``where`` says, on the host, where each slot of the pack lies among a rank's own rows and those received.
    """

    send_rows: Tensor
    send_counts: list[int]
    receive_counts: list[int]
    group_rows: int
    where: Ints


class BlockCall(NamedTuple):
    """A kernel call of this rank's queries on the keys of one rank, as indices on the device."""

    q_rows: Tensor | None
    kv_index: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    max_seqlen_q: int
    max_seqlen_kv: int
    left: int
    right: int


class RingStep(NamedTuple):
    """One step of the ring: the ranks to send keys to and receive them from, and the kernel call on them."""

    to: int
    source: int
    send_rows: Tensor
    receive_count: int
    call: BlockCall | None


def exchanged(layout: ShardLayout, *, causal: bool, left: int) -> Exchanged:
    """Return the exchange that brings every key this rank's queries see, computed once a batch."""

    def make() -> Exchanged:
        plan, where = needs.plan_exchange(
            layout.padded_lengths, **layout.cut, rank=layout.rank, causal=causal, left=left
        )
        return Exchanged(
            layout.put(plan.send_rows), plan.send_counts, plan.receive_counts, plan.group_rows, where
        )

    return layout.once(("exchange", causal, left), make)


def needed_call(layout: ShardLayout, *, causal: bool, left: int) -> Call:
    """Return the kernel call on this rank's keys followed by those that ``exchanged`` brings."""

    def make() -> Call:
        where = exchanged(layout, causal=causal, left=left).where
        return layout.make_call(where, causal=causal, left=left)

    return layout.once(("needed call", causal, left), make)


def block_calls(layout: ShardLayout, *, causal: bool, left: int, gathered: bool) -> list[BlockCall]:
    """Return the kernel calls on keys at hand, as an all-gather or ``exchanged`` left them, one a source."""

    def make() -> list[BlockCall]:
        calls, slots = [], layout.local_slots
        where = None if gathered else exchanged(layout, causal=causal, left=left).where
        for source in range(layout.cp):
            block = _block(layout, layout.rank, source, causal, left)
            if block is None:
                continue
            if where is None:
                rows: Ints = np.arange(source * slots, (source + 1) * slots)
            else:
                rows = where[partition.rank_indices(layout.padded_lengths, **layout.cut, rank=source)]
            calls.append(_put_block(layout, block, rows))
        return calls

    return layout.once(("blocks", causal, left, gathered), make)


def ring_steps(layout: ShardLayout, *, causal: bool, left: int) -> list[RingStep]:
    """Return the steps of the ring: this rank's keys first, then those of ranks one, two, ... before it.

    At step t every rank sends to the rank t places after it just the rows which that one needs, so that a key
    travels once and no rank holds keys of more than two others: those it works on and those on their way.
    """
    distances = range(layout.cp)
    return layout.once(
        ("ring", causal, left), lambda: [_ring_step(layout, d, causal, left) for d in distances]
    )


def _ring_step(layout: ShardLayout, distance: int, causal: bool, left: int) -> RingStep:
    to, source = (layout.rank + distance) % layout.cp, (layout.rank - distance) % layout.cp
    how: dict[str, Any] = {**layout.cut, "causal": causal, "left": left}
    block = _block(layout, layout.rank, source, causal, left)
    where: Ints = np.arange(layout.local_slots)
    sent = received = np.empty(0, np.int64)
    if distance:
        sent = needs.needed_rows(layout.padded_lengths, rank=to, source=layout.rank, **how)
        received = needs.needed_rows(layout.padded_lengths, rank=layout.rank, source=source, **how)
        where[received] = np.arange(len(received))
    call = None if block is None else _put_block(layout, block, where)
    return RingStep(to, source, layout.put(sent), len(received), call)


def _block(layout: ShardLayout, rank: int, source: int, causal: bool, left: int) -> needs.Block | None:
    return needs.plan_block(
        layout.padded_lengths, **layout.cut, rank=rank, source=source, causal=causal, left=left
    )


def _put_block(layout: ShardLayout, block: needs.Block, where: Ints) -> BlockCall:
    return BlockCall(
        q_rows=None if block.q_rows is None else layout.put(block.q_rows),
        kv_index=layout.put(where[block.kv_rows]),
        cu_seqlens_q=offsets_of(block.q_lengths, layout.device),
        cu_seqlens_kv=offsets_of(block.kv_lengths, layout.device),
        max_seqlen_q=int(block.q_lengths.max()),
        max_seqlen_kv=int(block.kv_lengths.max()),
        left=block.left,
        right=block.right,
    )
