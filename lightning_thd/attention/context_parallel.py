"""Queries, keys and values of one rank's shard -> the shard's attention output.

Keys reach other ranks in one of four ways:

- ``all_gather``: every rank gathers all keys and values. The backward pass reduce-scatters their gradients.
- ``needed``: a rank receives only the keys that its queries see, in one exchange of sizes known on the host.
- ``ring``: these keys arrive from one rank after the other, and ``merge`` combines the partial results.
- ``ulysses``: all-to-alls give each rank the whole pack for H / cp query heads; one more returns the output.

``auto`` is ``ulysses`` if a window looks ahead, else the cheaper of ``needed`` and ``ulysses`` for each batch
and kind of layer (``parallel.context.costs``).
Legend: T slots in a pack, N = T / cp, H query heads, G key-value heads, D head size, E value head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lightning_thd.attention.kernels.raw import RawKernel, gathered
from lightning_thd.attention.merge import KeySource, joined, merged_attention, split
from lightning_thd.attention.spec import AttentionSpec
from lightning_thd.boundaries import KernelCall
from lightning_thd.parallel.context import needs, partition
from lightning_thd.parallel.context.costs import LayerSizes, cheapest_way
from lightning_thd.parallel.context.layout import ShardLayout
from lightning_thd.parallel.exchange import all_gather_rows, exchange_rows, heads_to_rows, rows_to_heads

Way = Literal["all_gather", "ulysses", "needed", "ring"]


def choose_way(shard: ShardLayout, sizes: LayerSizes, spec: AttentionSpec) -> Way:
    """Choose how a layer's keys reach other context-parallel ranks; all ranks make the same choice."""
    looks_ahead = not spec.causal and spec.windowed
    setting = shard.communication

    if setting == "ulysses" or (looks_ahead and setting == "auto"):
        if sizes.heads % shard.cp != 0:
            raise ValueError(
                f"{sizes.heads} query heads cannot be shared out among {shard.cp} context-parallel ranks; "
                f"ulysses, and a window that looks ahead, need a multiple of {shard.cp}."
            )
        return "ulysses"

    if looks_ahead:
        raise ValueError(
            f"window=({spec.left}, {spec.right}) is not causal, and {setting!r} supports only causal "
            "windows. Use context_parallel_communication='ulysses'."
        )
    if setting == "auto":
        return _cheaper_way(shard, sizes, spec)
    # With a window, a ring supports only striped shards; ``needed`` replaces it for others.
    if setting == "ring" and shard.layout != "striped" and spec.left >= 0:
        return "needed"
    return setting


def _cheaper_way(shard: ShardLayout, sizes: LayerSizes, spec: AttentionSpec) -> Way:
    """Return the cheaper of ``needed`` and ``ulysses``, computed once per batch and kind of layer."""
    key = ("way", sizes, spec.causal, spec.left)
    if key not in shard.cache:
        counts = needs.need_counts(shard.padded_lengths, **shard.cut, causal=spec.causal, left=spec.left)
        most_pairs, pairs = _pairs(shard, spec)
        shard.cache[key] = cheapest_way(
            sizes,
            cp=shard.cp,
            slots=shard.local_slots,
            needed_rows=int(max(counts.sum(0).max(), counts.sum(1).max())),  # those of the busiest rank
            pairs=pairs,
            most_pairs=most_pairs,
        )
    way: Way = shard.cache[key]
    return way


def _pairs(shard: ShardLayout, spec: AttentionSpec) -> tuple[float, float]:
    """Count the query-key pairs of the busiest rank, and those of all ranks; with a window, estimate them."""
    lengths = np.asarray(shard.padded_lengths, dtype=np.float64)
    if spec.causal and spec.left >= 0:
        # All queries see about the same number of keys, so all ranks have about equal work.
        all_pairs = float(np.minimum(lengths, spec.left + 1) @ lengths)
        return all_pairs / shard.cp, all_pairs

    if spec.causal:
        pairs = partition.causal_work(shard.padded_lengths, **shard.cut)
    else:
        of_ranks = []
        for rank in range(shard.cp):
            queries = partition.held_lengths(shard.padded_lengths, **shard.cut, rank=rank)
            of_ranks.append(float((queries * lengths).sum()))
        pairs = np.array(of_ranks)
    return float(pairs.max()), float(pairs.sum())


def context_parallel_attention(
    attend: Callable[..., Tensor],
    raw_kernel: Callable[[], RawKernel],
    q_NHD: Tensor,
    k_NGD: Tensor,
    v_NGE: Tensor,
    shard: ShardLayout,
    *,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention output of this rank's shard of a pack; all ranks must call this together."""
    assert shard.group is not None
    sizes = LayerSizes(
        heads=q_NHD.shape[1],
        kv_heads=k_NGD.shape[1],
        head_size=q_NHD.shape[2],
        value_size=v_NGE.shape[2],
        element_bytes=q_NHD.element_size(),
    )
    way = choose_way(shard, sizes, spec)
    shard.traffic.count(way)

    if way == "ulysses":
        return _attend_to_pack(attend, q_NHD, k_NGD, v_NGE, shard, sinks)
    if way == "ring":
        steps = needs.ring_steps(shard, causal=spec.causal, left=spec.left)
        calls = [[step.call] if step.call else [] for step in steps]
        source = KeySource(calls, steps, shard.group, shard.traffic)
        return merged_attention(raw_kernel(), source, q_NHD, k_NGD, v_NGE, spec=spec, sinks=sinks)
    if shard.layout == "striped":
        blocks = needs.block_calls(shard, causal=spec.causal, left=spec.left, gathered=way == "all_gather")
        k, v = _fetch(k_NGD, v_NGE, way, shard, spec)
        return merged_attention(raw_kernel(), KeySource([blocks]), q_NHD, k, v, spec=spec, sinks=sinks)

    if way == "all_gather":
        call = shard.call(causal=spec.causal, left=spec.left)
    else:
        call = needs.needed_call(shard, causal=spec.causal, left=spec.left)
    k, v = _fetch(k_NGD, v_NGE, way, shard, spec, call.keys)
    return attend(q_NHD, k, v, call._replace(keys=None), sinks=sinks)  # these keys are gathered already


def _attend_to_pack(
    attend: Callable[..., Tensor],
    q_NHD: Tensor,
    k_NGD: Tensor,
    v_NGE: Tensor,
    shard: ShardLayout,
    sinks: Tensor | None,
) -> Tensor:
    """Attend by Ulysses: exchange rows for heads, attend on the whole pack, exchange back."""
    assert shard.group is not None
    kv_heads = _kv_heads_to_send(q_NHD.shape[1], k_NGD.shape[1], shard)
    exchange = partial(rows_to_heads, group=shard.group, traffic=shard.traffic)
    q = gathered(exchange(q_NHD), shard.restore)
    k = gathered(exchange(k_NGD, heads=kv_heads), shard.restore)
    v = gathered(exchange(v_NGE, heads=kv_heads), shard.restore)
    if sinks is not None:
        sinks = sinks.chunk(shard.cp)[shard.rank]

    lengths = shard.padded_lengths
    offsets = shard.pack_offsets
    longest = max(lengths)
    pack = KernelCall(offsets, offsets, longest, longest, q_lengths=lengths, kv_lengths=lengths)
    out = attend(q, k, v, pack, sinks=sinks)
    return heads_to_rows(gathered(out, shard.gathered), shard.group, traffic=shard.traffic)


def _fetch(
    k_NGD: Tensor,
    v_NGE: Tensor,
    way: Way,
    shard: ShardLayout,
    spec: AttentionSpec,
    index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Collect the keys and values of this and other ranks, and select the rows ``index`` (None means all)."""
    assert shard.group is not None
    rows = joined(k_NGD, v_NGE)

    if way == "all_gather":
        rows = all_gather_rows(rows, shard.group, shard.traffic)
    else:
        plan = needs.exchanged(shard, causal=spec.causal, left=spec.left)
        if plan.group_rows:  # the total of all ranks, so either all ranks exchange or none
            sent = rows.index_select(0, plan.send_rows)
            counts = (plan.send_counts, plan.receive_counts)
            received = exchange_rows(sent, *counts, shard.group, shard.traffic)
            rows = torch.cat([rows, received])

    return split(gathered(rows, index), k_NGD, v_NGE)


def _kv_heads_to_send(heads: int, kv_heads: int, shard: ShardLayout) -> Tensor | None:
    """Return the key-value heads to send, rank 0's first, equally many a rank; None if cp divides G."""
    if kv_heads % shard.cp == 0:
        return None

    heads_of_rank = heads // shard.cp
    heads_of_kv_head = heads // kv_heads
    # Send one key-value head per rank if all its query heads share that head, else one per query head.
    step = heads_of_rank if heads_of_kv_head % heads_of_rank == 0 else 1

    def make() -> Tensor:
        kv_heads_to_send: Tensor = shard.put(np.arange(0, heads, step) // heads_of_kv_head)
        return kv_heads_to_send

    return shard.once(("kv_heads", heads, kv_heads), make)
