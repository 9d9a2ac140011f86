"""The slow, obvious answer: dense fp64 attention, one sequence and one formula at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths_q: list[int], lengths_kv: list[int], *, left: int = -1,
    right: int = -1, scale: float | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return out [Tq, H, E] and lse [H, Tq] in fp64; differentiable."""
    q = q.double()
    k = k.double()
    v = v.double()
    queries_per_key = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(queries_per_key, 1)
    v = v.repeat_interleave(queries_per_key, 1)
    if scale is None:
        scale = q.shape[2] ** -0.5

    outs = []
    lses = []
    for qs, ks, vs in zip(q.split(lengths_q), k.split(lengths_kv), v.split(lengths_kv), strict=True):
        scores = torch.einsum("qhd,khd->hqk", qs, ks) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)

        i = torch.arange(len(qs))[:, None] + len(ks) - len(qs)  # the last query is at the last key
        j = torch.arange(len(ks))[None]
        is_seen = torch.ones(len(qs), len(ks), dtype=torch.bool)
        if left >= 0:
            is_seen &= j >= i - left
        if right >= 0:
            is_seen &= j <= i + right
        scores = scores.masked_fill(~is_seen, -torch.inf)

        if sinks is not None:  # one more key, whose value is zero
            column = sinks.double()[:, None, None].expand(-1, len(qs), 1)
            scores = torch.cat([scores, column], dim=2)
            vs = torch.cat([vs, vs.new_zeros(1, *vs.shape[1:])])
        lse = scores.logsumexp(2)
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(2)).exp()
        outs.append(torch.einsum("hqk,khe->qhe", weights, vs))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, dim=1)
