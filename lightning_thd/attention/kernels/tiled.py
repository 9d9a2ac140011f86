"""Batches of tiles -> out and log-sum-exp by plain matrix products: the path for softcap.

Legend: B tiles, R rows of queries, K keys, H query heads, G key-value heads, D head size, E value head size.
The scores of one call exist at a time, in fp32 (fp64 for fp64), and are computed again in the backward.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward(
    q_BRHD: Tensor, k_BKGD: Tensor, v_BKGE: Tensor, *, mask: Tensor | None, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Attend inside every tile by plain matrix products.

    Args:
        q_BRHD: ``[B, R, H, D]``.
        k_BKGD: ``[B, K, G, D]``.
        v_BKGE: ``[B, K, G, E]``.
        mask: additive ``[R, K]``, or None.
        scale: of the scores.
        softcap: the scores' bound, positive.

    Returns:
        out ``[B, R, H, E]`` and lse ``[B, R, H]``.
    """
    weights = _tanh_scores(q_BRHD, k_BKGD, scale / softcap).mul_(softcap)
    if mask is not None:
        weights += mask
    # Scores lie within the cap, so the largest weight before normalising is 1 and none overflows.
    top = weights.amax(-1, keepdim=True)
    total = weights.sub_(top).exp_().sum(-1, keepdim=True)
    out = (weights @ _kv_heads(v_BKGE, weights.dtype)) / total
    return _rows(out).to(q_BRHD.dtype), _rows(total.log() + top)[..., 0]


def backward(
    grad: Tensor,
    q_BRHD: Tensor,
    k_BKGD: Tensor,
    v_BKGE: Tensor,
    out: Tensor,
    lse_BRH: Tensor,
    *,
    mask: Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``forward`` to q, k and v; those to k and v stay in the dtype of lse."""
    groups, wide = q_BRHD.shape[2] // k_BKGD.shape[2], lse_BRH.dtype
    tanh = _tanh_scores(q_BRHD, k_BKGD, scale / softcap)
    weights = tanh * softcap
    if mask is not None:
        weights += mask
    weights = weights.sub_(_q_heads(lse_BRH.unsqueeze(-1), wide, groups)).exp_()
    dout = _q_heads(grad, wide, groups)
    delta = torch.linalg.vecdot(dout, _q_heads(out, wide, groups)).unsqueeze(-1)
    dv = (weights.transpose(-1, -2) @ dout).sum(2)
    dscores = (dout @ _kv_heads(v_BKGE, wide).transpose(-1, -2)).sub_(delta).mul_(weights)
    dscores *= tanh.square_().neg_().add_(1.0).mul_(scale)
    dq = dscores @ _kv_heads(k_BKGD, wide)
    dk = (dscores.transpose(-1, -2) @ _q_heads(q_BRHD, wide, groups)).sum(2)
    return _rows(dq).to(q_BRHD.dtype), dk.transpose(1, 2), dv.transpose(1, 2)


def _tanh_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Compute ``tanh(scale * q . k)`` as ``[B, G, H / G, R, K]``."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    queries = _q_heads(q, wide, q.shape[2] // k.shape[2])
    return (queries @ _kv_heads(k, wide).transpose(-1, -2)).mul_(scale).tanh_()


def _q_heads(x: Tensor, dtype: torch.dtype, groups: int) -> Tensor:
    """Reshape ``[B, R, H, D]`` to ``[B, G, H / G, R, D]``."""
    batch, length, heads, size = x.shape
    return x.to(dtype).reshape(batch, length, heads // groups, groups, size).permute(0, 2, 3, 1, 4)


def _kv_heads(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Reshape ``[B, K, G, D]`` to ``[B, G, 1, K, D]``."""
    return x.to(dtype).transpose(1, 2).unsqueeze(2)


def _rows(x: Tensor) -> Tensor:
    """Reshape ``[B, G, H / G, R, D]`` to ``[B, R, H, D]``."""
    return x.flatten(1, 2).transpose(1, 2)
