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
    q: Tensor, k: Tensor, v: Tensor, at: KernelCall, spec: AttentionSpec, *, self_attention: bool = True
) -> Tensor:
    """Attend from queries ``[Tq, H, D]`` to keys ``[Tkv, G, D]`` with values ``[Tkv, G, E]``."""
    if spec.windowed and not self_attention:  # an H200 gave errors of 0.04 with fewer keys than queries
        raise ValueError(
            "backend='te' cannot run this call: its windows are exact only if cu_seqlens_q and "
            "cu_seqlens_kv are the same tensor. Use backend='auto', which chooses another kernel."
        )
    deterministic = torch.are_deterministic_algorithms_enabled()
    attention = _module(*q.shape[1:], k.shape[1], v.shape[2], spec.scale, self_attention, deterministic)
    mask, left, right = "padding", spec.left, spec.right  # in THD all mask names begin with "padding"
    if not spec.causal and max(left, right) >= 0:  # non-causal windows need both bounds
        left, right = (at.max_seqlen_kv if left < 0 else left), (at.max_seqlen_q if right < 0 else right)
    if spec.causal:
        mask = "padding_causal" if self_attention else "padding_causal_bottom_right"
    options: dict[str, Any] = {"qkv_format": "thd", "attn_mask_type": mask, "pad_between_seqs": False}
    options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_q_padded"), at.cu_seqlens_q)
    options |= dict.fromkeys(("cu_seqlens_kv", "cu_seqlens_kv_padded"), at.cu_seqlens_kv)
    options |= {
        "max_seqlen_q": at.max_seqlen_q,
        "max_seqlen_kv": at.max_seqlen_kv,
        "window_size": (left, right),
    }
    # Transformer Engine refuses tensors that start at an offset in their storage, even contiguous ones.
    given = [
        x.clone(memory_format=torch.contiguous_format) if x.storage_offset() else x.contiguous()
        for x in (q, k, v)
    ]
    out: Tensor = attention(*given, **options)
    return out.view(q.shape[0], q.shape[1], v.shape[2])


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
    return te.DotProductAttention(
        heads,
        head_size if head_size == value_size else (head_size, value_size),
        num_gqa_groups=kv_heads,
        attention_dropout=0.0,
        qkv_format="thd",
        attention_type="self" if self_attention else "cross",
        softmax_scale=scale,
    )
