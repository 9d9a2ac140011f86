"""Queries, keys and values of one rank's shard -> its attention output, around any kernel for whole packs.

Two ways. ``all_gather``: keys and values of all ranks come here, and every stretch of queries attends to the
keys of its sequence up to its own last; the backward pass reduce-scatters. ``ulysses``: rows are traded for
heads, the kernel sees the whole pack with H / cp heads, and the output is traded back.

Legend: T slots in a pack, N = T / cp, H query heads, G key-value heads, D head size, E value head size.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from lightning_thd.attention.kernels.kernel import Offsets
from lightning_thd.attention.spec import AttentionSpec
from lightning_thd.parallel.exchange import all_gather_rows, heads_to_rows, rows_to_heads
from lightning_thd.parallel.layout import ShardLayout


class PackAttention(Protocol):
    """Attention inside sequences given by offsets, bottom-right where lengths differ."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, at: Offsets, *, sinks: Tensor | None) -> Tensor:
        """Return ``[Tq, H, E]``."""


def context_parallel_attention(
    attend: PackAttention,
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
        q_NHD: ``[N, H, D]``.
        k_NGD: ``[N, G, D]``; G divides H.
        v_NGE: ``[N, G, E]``.
        layout: of the shard.
        spec: window and causality, which decide what keys are needed.
        sinks: ``[H]`` or None.

    Returns:
        ``[N, H, E]``.

    Raises:
        ValueError: when ``ulysses`` is asked for and the heads do not divide, or a window looks ahead under
            ``all_gather``.
    """
    if choose_communication(layout, q_NHD.shape[1], spec) == "ulysses":
        return _over_heads(attend, q_NHD, k_NGD, v_NGE, layout, sinks)
    call = layout.call(causal=spec.causal, left=spec.left)
    k, v = _gather(k_NGD, v_NGE, layout, call.kv_index)
    at = Offsets(call.cu_seqlens_q, call.cu_seqlens_kv, call.max_seqlen_q, call.max_seqlen_kv)
    return attend(q_NHD, k, v, at, sinks=sinks)


def choose_communication(
    layout: ShardLayout, heads: int, spec: AttentionSpec
) -> Literal["all_gather", "ulysses"]:
    """Decide between the two ways: ``auto`` is ``ulysses`` where the query heads divide."""
    ahead = not spec.causal and spec.windowed
    divides = heads % layout.cp == 0
    if layout.communication == "ulysses" or (layout.communication == "auto" and (divides or ahead)):
        if not divides:
            raise ValueError(
                f"{heads} query heads cannot be shared out among {layout.cp} context-parallel ranks; ulysses "
                f"wants a multiple of {layout.cp}. Use context_parallel_communication='all_gather'"
                + (", and no window that looks ahead." if ahead else ".")
            )
        return "ulysses"
    if ahead:
        raise ValueError(
            f"A window of {spec.left} keys before and {spec.right} after a query looks ahead, which "
            "all_gather cannot express as one call of a kernel. Use "
            "context_parallel_communication='ulysses'."
        )
    return "all_gather"


def _gather(k_NGD: Tensor, v_NGE: Tensor, layout: ShardLayout, index: Tensor) -> tuple[Tensor, Tensor]:
    """Bring all keys and values here in one collective, and lay out those that are needed."""
    assert layout.group is not None
    both = torch.cat([k_NGD.flatten(1), v_NGE.flatten(1)], dim=1)
    rows = all_gather_rows(both, layout.group).index_select(0, index)
    width = k_NGD.shape[1] * k_NGD.shape[2]
    k, v = rows[:, :width], rows[:, width:]
    return k.reshape(-1, *k_NGD.shape[1:]), v.reshape(-1, *v_NGE.shape[1:])


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
    """int64 ``[cp * g]``, the key-value heads that the query heads of every rank need; None if each has own.

    Heads 0 to 7 on 2 key-value heads over 4 ranks need ``[0, 0, 1, 1]``.
    """
    cp, share = layout.cp, heads // kv_heads
    if kv_heads % cp == 0:
        return None
    key = ("kv_heads", heads, kv_heads)
    if key not in layout.cache:
        own = heads // cp
        # One key-value head for each rank's query heads where they share it, else one for every query head.
        step = own if share % own == 0 else 1
        layout.cache[key] = (torch.arange(0, heads, step) // share).to(layout.device, non_blocking=True)
    wanted: Tensor = layout.cache[key]
    return wanted
