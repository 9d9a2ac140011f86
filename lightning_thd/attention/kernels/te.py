"""CUDA tensors -> Transformer Engine's DotProductAttention in THD: cuDNN's kernels, or flash-attn.

Legend: T slots, S sequences, H query heads, G key-value heads, D head size, E value head size.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_thd._imports import require
from lightning_thd.attention.spec import AttentionSpec, Offsets


@torch.compiler.disable  # type: ignore[untyped-decorator]  # as Transformer Engine's own forward is
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    at: Offsets,
    spec: AttentionSpec,
    *,
    self_attention: bool = True,
) -> Tensor:
    """Attend from queries ``[Tq, H, D]`` to ``[Tkv, G, D]`` and ``[Tkv, G, E]``; return ``[Tq, H, E]``."""
    attention = _module(
        q.shape[1],
        k.shape[1],
        q.shape[2],
        v.shape[2],
        spec.scale,
        self_attention,
        torch.are_deterministic_algorithms_enabled(),
    )
    mask, window = "padding", window_of(spec, at)  # in THD every mask's name begins with "padding"
    if spec.causal:
        mask = "padding_causal" if self_attention else "padding_causal_bottom_right"
    out: Tensor = attention(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        qkv_format="thd",
        cu_seqlens_q=at.cu_q,
        cu_seqlens_kv=at.cu_kv,
        cu_seqlens_q_padded=at.cu_q,
        cu_seqlens_kv_padded=at.cu_kv,
        max_seqlen_q=at.max_q,
        max_seqlen_kv=at.max_kv,
        attn_mask_type=mask,
        window_size=window,
        pad_between_seqs=False,
    )
    return out.view(q.shape[0], q.shape[1], v.shape[2])


def window_of(spec: AttentionSpec, at: Offsets) -> tuple[int, int]:
    """Return the window as Transformer Engine takes it: causal, or both sides open, or both bounded."""
    left, right = spec.left, spec.right
    if spec.causal or (left < 0 and right < 0):
        return left, right
    return (at.max_kv if left < 0 else left), (at.max_q if right < 0 else right)


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
    """Build Transformer Engine's attention module once a shape; it holds no parameters."""
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
