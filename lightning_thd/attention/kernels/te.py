"""CUDA tensors -> Transformer Engine's DotProductAttention in THD: cuDNN's kernels, or flash-attn.

The one backend that knows padding between sequences: it takes real offsets and offsets in memory.

Legend: T slots, S sequences, H query heads, G key-value heads, D head size, E value head size.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_thd._imports import require
from lightning_thd.attention.kernels.kernel import Offsets
from lightning_thd.attention.spec import AttentionSpec


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    at: Offsets,
    spec: AttentionSpec,
    *,
    padded: Offsets | None = None,
    self_attention: bool = True,
) -> Tensor:
    """Attend with Transformer Engine.

    Args:
        q: ``[Tq, H, D]`` fp16 or bf16 on a CUDA device.
        k: ``[Tkv, G, D]``.
        v: ``[Tkv, G, E]``.
        at: the sequences; with ``padded``, their real lengths, cumulative.
        spec: window and scale; softcap is 0.
        padded: where the sequences lie in memory, when padding lies between them. Its rows come back as 0 or
            unwritten, as Transformer Engine leaves them: mask their loss.
        self_attention: whether q and k have the same lengths, so that top-left and bottom-right causal agree.

    Returns:
        ``[Tq, H, E]``.
    """
    where = at if padded is None else padded
    attention = _module(
        q.shape[1],
        k.shape[1],
        q.shape[2],
        v.shape[2],
        spec.scale,
        self_attention,
        torch.are_deterministic_algorithms_enabled(),
    )
    out: Tensor = attention(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        qkv_format="thd",
        cu_seqlens_q=at.cu_q,
        cu_seqlens_kv=at.cu_kv,
        cu_seqlens_q_padded=where.cu_q,
        cu_seqlens_kv_padded=where.cu_kv,
        max_seqlen_q=where.max_q,
        max_seqlen_kv=where.max_kv,
        attn_mask_type=mask_type(spec, self_attention=self_attention),
        window_size=(spec.left, spec.right),
        pad_between_seqs=padded is not None,
    )
    return out.view(q.shape[0], q.shape[1], v.shape[2])


def mask_type(spec: AttentionSpec, *, self_attention: bool) -> str:
    """Name the mask as Transformer Engine does; in THD every name begins with "padding"."""
    if not spec.causal:
        return "padding"
    return "padding_causal" if self_attention else "padding_causal_bottom_right"


@lru_cache(maxsize=64)
def _module(
    heads: int,
    kv_heads: int,
    head_size: int,
    value_size: int,
    scale: float,
    self_attention: bool,
    deterministic: bool,
) -> Any:
    """Build the module once a shape: it has no parameters; ``deterministic`` is read when it is built."""
    te = require("transformer_engine.pytorch", feature="backend='te'")
    return te.DotProductAttention(
        heads,
        head_size if head_size == value_size else (head_size, value_size),
        num_gqa_groups=kv_heads,
        attention_dropout=0.0,
        qkv_format="thd",
        attention_type="self" if self_attention else "cross",
        softmax_scale=scale,
    )
