"""One tile of q, k, v -> out and log-sum-exp by plain matrix products: the path for what no flash kernel offers.

Softcap runs here. Scores of one tile exist at a time, in fp32 (fp64 for fp64), and are computed again in the backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_thd.attention.plan import Tile
from lightning_thd.attention.spec import AttentionSpec


def hidden(tile: Tile) -> Tensor:
    """Say which keys a query may not see.

    Returns:
        bool ``[rows, keys]``, True where hidden. A triangle of two rows gives ``[[False, True], [False, False]]``.
    """
    distance = torch.arange(tile.k1 - tile.k0) - torch.arange(tile.q1 - tile.q0)[:, None] - tile.shift
    mask = torch.zeros_like(distance, dtype=torch.bool)
    if tile.left >= 0:
        mask |= distance < -tile.left
    if tile.right >= 0:
        mask |= distance > tile.right
    return mask


def forward(q: Tensor, k: Tensor, v: Tensor, tile: Tile, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Attend inside one tile.

    Args:
        q: ``[rows, H, D]``.
        k: ``[keys, G, D]``.
        v: ``[keys, G, E]``.
        tile: where the diagonal runs.
        spec: scale and softcap.

    Returns:
        out ``[rows, H, E]`` and lse ``[H, rows]``.
    """
    scores, _ = _scores(q, k, tile, spec)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
    out = weights @ _heads(v, scores.dtype, 1)
    return _merge(out).to(q.dtype), lse.flatten(0, 1)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``forward`` to q, k and v, from out and a finite lse."""
    groups = q.shape[1] // k.shape[1]
    scores, capped = _scores(q, k, tile, spec)
    weights = (scores - lse.unflatten(0, (-1, groups)).unsqueeze(-1)).exp()
    wide = scores.dtype
    dout, out = _heads(grad, wide, groups), _heads(out, wide, groups)
    dv = (weights.transpose(-1, -2) @ dout).sum(1)
    ds = weights * (dout @ _heads(v, wide, 1).transpose(-1, -2) - (dout * out).sum(-1, keepdim=True))
    if spec.softcap:
        ds = ds * (1.0 - (capped / spec.softcap) ** 2)
    ds = ds * spec.scale
    dq = ds @ _heads(k, wide, 1)
    dk = (ds.transpose(-1, -2) @ _heads(q, wide, groups)).sum(1)
    return _merge(dq).to(q.dtype), dk.transpose(0, 1), dv.transpose(0, 1)


def _heads(x: Tensor, dtype: torch.dtype, groups: int) -> Tensor:
    """``[L, H, D]`` to ``[G, H / G, L, D]``."""
    return x.to(dtype).unflatten(1, (-1, groups)).permute(1, 2, 0, 3)


def _merge(x: Tensor) -> Tensor:
    return x.flatten(0, 1).transpose(0, 1)


def _scores(q: Tensor, k: Tensor, tile: Tile, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Scores after softcap with -inf where hidden, and without hiding: ``[G, H / G, rows, keys]``."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = _heads(q, wide, q.shape[1] // k.shape[1]) @ _heads(k, wide, 1).transpose(-1, -2) * spec.scale
    if spec.softcap:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    return scores.masked_fill(hidden(tile), -torch.inf), scores
