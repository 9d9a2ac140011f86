"""Batches of tiles -> torch's flash kernel for CPUs and back, with key-value heads shared, not copied.

Legend: B tiles, R rows of queries, K keys, H query heads, G key-value heads, D head size.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def forward(
    q_BRHD: Tensor, k_BKGD: Tensor, v_BKGD: Tensor, *, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend inside every tile by torch's flash kernel for CPUs.

    Args:
        q_BRHD: ``[B, R, H, D]``, last stride 1.
        k_BKGD: ``[B, K, G, D]``.
        v_BKGD: ``[B, K, G, D]``.
        causal: query i sees keys 0..i; then there is no mask.
        mask: additive ``[R, K]``, or None.
        scale: of the scores.

    Returns:
        out ``[B, R, H, D]`` and lse ``[B, R, H]``.
    """
    dtype = q_BRHD.dtype
    k, v = (_share_heads(x, q_BRHD.shape[2]) for x in (k_BKGD, v_BKGD))
    # CPUs multiply fp16 slowly: in fp32 the forward takes 0.45 of the time (benchmarks/attention_kernels.py)
    wide = torch.float32 if dtype == torch.float16 else dtype
    out, lse = _forward(
        *(x.to(wide).transpose(1, 2) for x in (q_BRHD, k, v)),
        0.0,
        causal,
        attn_mask=_expand(mask),
        scale=scale,
    )
    return out.transpose(1, 2).to(dtype), lse.transpose(1, 2)


def backward(
    grad: Tensor,
    q_BRHD: Tensor,
    k_BKGD: Tensor,
    v_BKGD: Tensor,
    out: Tensor,
    lse_BRH: Tensor,
    *,
    causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of ``forward`` to q, k and v, in their shapes and dtype.

    Half precision goes backward in fp32: torch's own backward for it takes 2.4 times as long on a CPU, and is
    four times further from fp64 in dv (benchmarks/attention.py).
    """
    narrow, wide = q_BRHD.dtype, torch.promote_types(q_BRHD.dtype, torch.float32)
    k, v = (_share_heads(x, q_BRHD.shape[2]) for x in (k_BKGD, v_BKGD))
    grads = _backward(
        *(x.to(wide).transpose(1, 2) for x in (grad, q_BRHD, k, v, out)),
        lse_BRH.transpose(1, 2),
        0.0,
        causal,
        attn_mask=_expand(mask if mask is None else mask.to(wide)),
        scale=scale,
    )
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    kv_heads = k_BKGD.shape[2]
    return dq.to(narrow), _sum_heads(dk, kv_heads).to(narrow), _sum_heads(dv, kv_heads).to(narrow)


@cache
def kernel_shares_heads() -> bool:
    """Return whether torch's kernel takes fewer key-value than query heads, forward and backward."""
    q, kv = torch.ones(1, 2, 1, 8), torch.ones(1, 1, 1, 8)
    try:
        out, lse = _forward(q, kv, kv, 0.0, False)
        grads = _backward(q, q, kv, kv, out, lse, 0.0, False)
    except RuntimeError:
        return False
    return torch.equal(out, q) and grads[2].shape == kv.shape and torch.equal(grads[2], 2 * kv)


def _share_heads(x: Tensor, heads: int) -> Tensor:
    if x.shape[2] == heads or kernel_shares_heads():
        return x
    return x.repeat_interleave(heads // x.shape[2], 2)


def _sum_heads(x: Tensor, kv_heads: int) -> Tensor:
    return x if x.shape[2] == kv_heads else x.unflatten(2, (kv_heads, -1)).sum(3)  # type: ignore[no-untyped-call]


def _expand(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask[None, None]
