"""CUDA tensors -> Transformer Engine's DotProductAttention in THD, which runs cuDNN's kernels or flash-attn.

Legend: T slots, H query heads, G key-value heads, D head size, E value head size.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_thd._imports import require
from lightning_thd.attention.spec import AttentionSpec
from lightning_thd.boundaries import KernelCall


@torch.compiler.disable  # type: ignore[untyped-decorator]  # Transformer Engine does the same to its forward
def attend(
    q: Tensor, k: Tensor, v: Tensor, call: KernelCall, spec: AttentionSpec, *, self_attention: bool = True
) -> Tensor:
    """Attend from queries ``[Tq, H, D]`` to keys ``[Tkv, G, D]`` with values ``[Tkv, G, E]``."""
    if spec.windowed and not self_attention:  # an H200 gave errors of 0.04 with fewer keys than queries
        raise ValueError(
            "backend='te' cannot run this call: its windows are exact only if cu_seqlens_q and "
            "cu_seqlens_kv are the same tensor. Use backend='auto', which chooses another kernel."
        )
    deterministic = torch.are_deterministic_algorithms_enabled()
    attention = _module(*q.shape[1:], k.shape[1], v.shape[2], spec.scale, self_attention, deterministic)

    out: Tensor = attention(
        _contiguous_from_start(q),
        _contiguous_from_start(k),
        _contiguous_from_start(v),
        qkv_format="thd",
        attn_mask_type=_mask_name(spec, self_attention),
        window_size=_window_sides(spec, call),
        cu_seqlens_q=call.cu_seqlens_q,
        cu_seqlens_kv=call.cu_seqlens_kv,
        cu_seqlens_q_padded=call.cu_seqlens_q,
        cu_seqlens_kv_padded=call.cu_seqlens_kv,
        max_seqlen_q=call.max_seqlen_q,
        max_seqlen_kv=call.max_seqlen_kv,
        pad_between_seqs=False,
    )
    return out.view(q.shape[0], q.shape[1], v.shape[2])


def _mask_name(spec: AttentionSpec, self_attention: bool) -> str:
    """Return Transformer Engine's name of a mask; in THD all names begin with "padding"."""
    if not spec.causal:
        return "padding"
    return "padding_causal" if self_attention else "padding_causal_bottom_right"


def _window_sides(spec: AttentionSpec, call: KernelCall) -> tuple[int, int]:
    """Return the window's two sides; a window that is not causal needs a number on both."""
    left = spec.left
    right = spec.right
    if spec.causal or max(left, right) < 0:
        return left, right

    if left < 0:
        left = call.max_seqlen_kv
    if right < 0:
        right = call.max_seqlen_q
    return left, right


def _contiguous_from_start(x: Tensor) -> Tensor:
    """Copy what Transformer Engine refuses: strided tensors, and those at an offset in their storage."""
    if x.storage_offset():
        return x.clone(memory_format=torch.contiguous_format)
    return x.contiguous()


@lru_cache(maxsize=64)
def _module(
    heads: int,
    head_size: int,
    kv_heads: int,
    value_size: int,
    scale: float,
    self_attention: bool,
    deterministic: bool,
) -> Any:
    """Build the module, which reads torch's deterministic mode; ``deterministic`` is only a cache key."""
    te = require("transformer_engine.pytorch", feature="backend='te'")
    sizes = head_size if head_size == value_size else (head_size, value_size)
    return te.DotProductAttention(
        heads,
        sizes,
        num_gqa_groups=kv_heads,
        attention_dropout=0.0,
        qkv_format="thd",
        attention_type="self" if self_attention else "cross",
        softmax_scale=scale,
    )
