"""Queries, keys and values of one rank's shard -> its attention output, around any kernel for whole packs.

Four ways. ``all_gather``: keys and values of all ranks come here, and every stretch of queries attends to the
keys of its sequence up to its own last; the backward pass reduce-scatters. ``needed``: the same call, but
only keys that some query here sees are sent, in one exchange of sizes that the host knows. ``ring``: needed
keys come from one rank after the other and partial results are merged (``merge``). ``ulysses``: rows are
traded for heads, the kernel sees the whole pack with H / cp heads, and the output is traded back.

Legend: T slots in a pack, N = T / cp, H query heads, G key-value heads, D head size, E value head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from lightning_thd.attention.choice import Way, choose_way
from lightning_thd.attention.kernels.raw import RawKernel
from lightning_thd.attention.merge import AtHand, Ring, joined, merged_attention, split
from lightning_thd.attention.spec import AttentionSpec, Offsets
from lightning_thd.parallel.context import calls, traffic
from lightning_thd.parallel.context.costs import LayerSizes
from lightning_thd.parallel.context.layout import ShardLayout
from lightning_thd.parallel.exchange import all_gather_rows, exchange_rows, heads_to_rows, rows_to_heads


class PackAttention(Protocol):
    """A function that attends inside sequences given by offsets, bottom-right where lengths differ."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, at: Offsets, *, sinks: Tensor | None) -> Tensor:
        """Return the attention output ``[Tq, H, E]``."""


def context_parallel_attention(
    attend: PackAttention,
    raw_kernel: Callable[[], RawKernel],
    q_NHD: Tensor,
    k_NGD: Tensor,
    v_NGE: Tensor,
    *,
    layout: ShardLayout,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend over the sequences of a pack of which this rank holds a shard; a collective.

    Args:
        attend: does what ``spec`` says within sequences given by offsets.
        raw_kernel: gives the kernel whose partial results can be merged; asked where a way merges them.
        q_NHD: ``[N, H, D]``.
        k_NGD: ``[N, G, D]``; G divides H.
        v_NGE: ``[N, G, E]``.
        layout: of the shard.
        spec: window and causality, which decide what keys are needed.
        sinks: ``[H]`` or None.

    Raises:
        ValueError: when ``ulysses`` is asked for and the heads do not divide, or a window looks ahead under
            another way.
    """
    sizes = LayerSizes(
        heads=q_NHD.shape[1],
        kv_heads=k_NGD.shape[1],
        head_size=q_NHD.shape[2],
        value_size=v_NGE.shape[2],
        element_bytes=q_NHD.element_size(),
    )
    way = choose_way(layout, sizes, spec)
    if way == "ulysses":
        traffic.count(sizes.ulysses_bytes(layout.local_slots, layout.cp), way)
        return _over_heads(attend, q_NHD, k_NGD, v_NGE, layout, sinks)
    if way == "ring":
        steps = calls.ring_steps(layout, causal=spec.causal, left=spec.left)
        traffic.count(sum(step.receive_count for step in steps) * sizes.key_bytes, way)
        assert layout.group is not None
        ring = Ring(steps, layout.group)
        return merged_attention(raw_kernel(), ring, q_NHD, k_NGD, v_NGE, spec=spec, sinks=sinks)
    if layout.layout == "striped":
        blocks = calls.block_calls(layout, causal=spec.causal, left=spec.left, gathered=way == "all_gather")
        k, v = _bring(k_NGD, v_NGE, way, layout, spec, sizes)
        return merged_attention(raw_kernel(), AtHand(blocks), q_NHD, k, v, spec=spec, sinks=sinks)
    if way == "all_gather":
        call = layout.call(causal=spec.causal, left=spec.left)
    else:
        call = calls.needed_call(layout, causal=spec.causal, left=spec.left)
    k, v = _bring(k_NGD, v_NGE, way, layout, spec, sizes, call.kv_index)
    at = Offsets(call.cu_seqlens_q, call.cu_seqlens_kv, call.max_seqlen_q, call.max_seqlen_kv)
    return attend(q_NHD, k, v, at, sinks=sinks)


def _bring(
    k_NGD: Tensor,
    v_NGE: Tensor,
    way: Way,
    layout: ShardLayout,
    spec: AttentionSpec,
    sizes: LayerSizes,
    index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gather other ranks' keys and values in one collective, and select the rows that ``index`` names.

    Returns:
        ``[M, G, D]`` and ``[M, G, E]``; without an index those of all ranks, or this rank's own and behind
        them the others it needs.
    """
    assert layout.group is not None
    rows = joined(k_NGD, v_NGE)
    if way == "all_gather":
        traffic.count(sizes.gather_bytes(layout.local_slots, layout.cp), way)
        rows = all_gather_rows(rows, layout.group)
    else:
        plan = calls.exchanged(layout, causal=spec.causal, left=spec.left)
        traffic.count(sum(plan.receive_counts) * sizes.key_bytes, way)
        if plan.group_rows:  # the same on every rank
            sent = rows.index_select(0, plan.send_rows)
            received = exchange_rows(sent, plan.send_counts, plan.receive_counts, layout.group)
            rows = torch.cat([rows, received])
    return split(rows if index is None else rows.index_select(0, index), k_NGD, v_NGE)


def _over_heads(
    attend: PackAttention,
    q_NHD: Tensor,
    k_NGD: Tensor,
    v_NGE: Tensor,
    layout: ShardLayout,
    sinks: Tensor | None,
) -> Tensor:
    assert layout.group is not None
    wanted = _wanted_kv_heads(q_NHD.shape[1], k_NGD.shape[1], layout)
    q = _in_order(rows_to_heads(q_NHD, layout.group), layout.restore)
    k, v = (_in_order(rows_to_heads(x, layout.group, wanted), layout.restore) for x in (k_NGD, v_NGE))
    longest = max(layout.padded_lengths)
    own = None if sinks is None else sinks.chunk(layout.cp)[layout.rank]
    out = attend(q, k, v, Offsets(layout.pack_offsets, layout.pack_offsets, longest, longest), sinks=own)
    return heads_to_rows(_in_order(out, layout.gathered), layout.group)


def _in_order(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x.index_select(0, index)


def _wanted_kv_heads(heads: int, kv_heads: int, layout: ShardLayout) -> Tensor | None:
    """Return the key-value heads that every rank's query heads need, int64 ``[cp * g]``, or None.

    Heads 0 to 7 on 2 key-value heads over 4 ranks need ``[0, 0, 1, 1]``.
    """
    cp, share = layout.cp, heads // kv_heads
    if kv_heads % cp == 0:
        return None
    # One key-value head for each rank's query heads where they share it, else one for every query head.
    step = heads // cp if share % (heads // cp) == 0 else 1
    return layout.once(
        ("kv_heads", heads, kv_heads),
        lambda: (torch.arange(0, heads, step) // share).to(layout.device, non_blocking=True),
    )
