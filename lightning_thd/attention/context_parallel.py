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
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_thd.attention.kernels.raw import RawKernel, gathered
from lightning_thd.attention.merge import KeySource, joined, merged_attention, split
from lightning_thd.attention.spec import AttentionSpec
from lightning_thd.boundaries import KernelCall
from lightning_thd.parallel.context import needs, partition, traffic
from lightning_thd.parallel.context.costs import LayerSizes, cheapest_way
from lightning_thd.parallel.context.layout import ShardLayout
from lightning_thd.parallel.exchange import all_gather_rows, exchange_rows, heads_to_rows, rows_to_heads

Way = Literal["all_gather", "ulysses", "needed", "ring"]


def choose_way(layout: ShardLayout, sizes: LayerSizes, spec: AttentionSpec) -> Way:
    """Choose how a layer's keys reach other context-parallel ranks; all ranks make the same choice."""
    looks_ahead = not spec.causal and spec.windowed
    asked = layout.communication
    if asked == "ulysses" or (looks_ahead and asked == "auto"):
        if sizes.heads % layout.cp != 0:
            raise ValueError(
                f"{sizes.heads} query heads cannot be shared out among {layout.cp} context-parallel ranks; "
                f"ulysses, and a window that looks ahead, need a multiple of {layout.cp}."
            )
        return "ulysses"
    if looks_ahead:
        raise ValueError(
            f"window=({spec.left}, {spec.right}) is not causal, and {asked!r} supports only causal windows. "
            "Use context_parallel_communication='ulysses'."
        )
    if asked == "all_gather":
        return asked
    if asked == "auto":
        return _cheaper_way(layout, sizes, spec)
    # With a window, a ring supports only striped shards; ``needed`` replaces it for others.
    return "needed" if asked == "ring" and layout.layout != "striped" and spec.left >= 0 else asked


def _cheaper_way(layout: ShardLayout, sizes: LayerSizes, spec: AttentionSpec) -> Way:
    """Return the cheaper of ``needed`` and ``ulysses``, computed once per batch and kind of layer."""
    key = ("way", sizes, spec.causal, spec.left)
    if key not in layout.cache:
        counts = needs.need_counts(layout.padded_lengths, **layout.cut, causal=spec.causal, left=spec.left)
        most, pairs = _pairs(layout, spec)
        needed = int(max(counts.sum(0).max(), counts.sum(1).max()))
        work: Any = {"needed_rows": needed, "pairs": pairs, "most_pairs": most}
        layout.cache[key] = cheapest_way(sizes, cp=layout.cp, slots=layout.local_slots, **work)
    way: Way = layout.cache[key]
    return way


def _pairs(layout: ShardLayout, spec: AttentionSpec) -> tuple[float, float]:
    """Count the query-key pairs of the busiest rank, and those of all ranks; with a window, estimate them."""
    lengths = np.asarray(layout.padded_lengths, dtype=np.float64)
    if not spec.causal:
        held = [partition.held_lengths(layout.padded_lengths, **layout.cut, rank=r) for r in range(layout.cp)]
        work = np.array([float((queries * lengths).sum()) for queries in held])
    elif spec.left < 0:
        work = partition.causal_work(layout.padded_lengths, **layout.cut)
    else:  # all queries see about the same number of keys, so all ranks have about equal work
        seen = float(np.minimum(lengths, spec.left + 1) @ lengths)
        return seen / layout.cp, seen
    return float(work.max()), float(work.sum())


def context_parallel_attention(
    attend: Callable[..., Tensor],
    raw_kernel: Callable[[], RawKernel],
    q_NHD: Tensor,
    k_NGD: Tensor,
    v_NGE: Tensor,
    *,
    layout: ShardLayout,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention output of this rank's shard of a pack; all ranks must call this together."""
    heads: Any = {"heads": q_NHD.shape[1], "kv_heads": k_NGD.shape[1], "element_bytes": q_NHD.element_size()}
    way = choose_way(layout, LayerSizes(**heads, head_size=q_NHD.shape[2], value_size=v_NGE.shape[2]), spec)
    assert layout.group is not None
    traffic.count(way)
    if way == "ulysses":
        wanted = _wanted_kv_heads(q_NHD.shape[1], k_NGD.shape[1], layout)
        q = gathered(rows_to_heads(q_NHD, layout.group), layout.restore)
        k, v = (gathered(rows_to_heads(x, layout.group, wanted), layout.restore) for x in (k_NGD, v_NGE))
        longest, offsets = max(layout.padded_lengths), layout.pack_offsets
        rank_sinks = None if sinks is None else sinks.chunk(layout.cp)[layout.rank]
        lengths = layout.padded_lengths
        whole = KernelCall(offsets, offsets, longest, longest, q_lengths=lengths, kv_lengths=lengths)
        out = attend(q, k, v, whole, sinks=rank_sinks)
        return heads_to_rows(gathered(out, layout.gathered), layout.group)
    if way == "ring":
        steps = needs.ring_steps(layout, causal=spec.causal, left=spec.left)
        ring = KeySource([[s.call] if s.call else [] for s in steps], steps, layout.group)
        return merged_attention(raw_kernel(), ring, q_NHD, k_NGD, v_NGE, spec=spec, sinks=sinks)
    if layout.layout == "striped":
        blocks = needs.block_calls(layout, causal=spec.causal, left=spec.left, gathered=way == "all_gather")
        k, v = _fetch(k_NGD, v_NGE, way, layout, spec)
        return merged_attention(raw_kernel(), KeySource([blocks]), q_NHD, k, v, spec=spec, sinks=sinks)
    if way == "all_gather":
        call = layout.call(causal=spec.causal, left=spec.left)
    else:
        call = needs.needed_call(layout, causal=spec.causal, left=spec.left)
    k, v = _fetch(k_NGD, v_NGE, way, layout, spec, call.keys)
    return attend(q_NHD, k, v, call._replace(keys=None), sinks=sinks)


def _fetch(
    k_NGD: Tensor,
    v_NGE: Tensor,
    way: Way,
    layout: ShardLayout,
    spec: AttentionSpec,
    index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Collect the keys and values of this and other ranks, and select the rows ``index`` (None means all)."""
    assert layout.group is not None
    rows = joined(k_NGD, v_NGE)
    if way == "all_gather":
        rows = all_gather_rows(rows, layout.group)
    else:
        plan = needs.exchanged(layout, causal=spec.causal, left=spec.left)
        if plan.group_rows:  # the total of all ranks, so either all ranks exchange or none
            sent = rows.index_select(0, plan.send_rows)
            received = exchange_rows(sent, plan.send_counts, plan.receive_counts, layout.group)
            rows = torch.cat([rows, received])
    return split(gathered(rows, index), k_NGD, v_NGE)


def _wanted_kv_heads(heads: int, kv_heads: int, layout: ShardLayout) -> Tensor | None:
    """Return the key-value heads to send, rank 0's first, equally many a rank; None if cp divides G."""
    cp, share = layout.cp, heads // kv_heads
    if kv_heads % cp == 0:
        return None
    # Send one key-value head per rank if all its query heads share that head, else one per query head.
    step = heads // cp if share % (heads // cp) == 0 else 1
    key = ("kv_heads", heads, kv_heads)
    wanted: Tensor = layout.once(key, lambda: layout.put(np.arange(0, heads, step) // share))
    return wanted
