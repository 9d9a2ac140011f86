"""Batches of tiles -> out, log-sum-exp and gradients, by torch's flash kernel for CPUs or matrix products.

Legend: B tiles, R rows of queries, K keys, H query heads, G key-value heads, D head size, E value head size.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_thd.attention.kernels.cpu_plan import Tiles
from lightning_thd.attention.spec import AttentionSpec

_SMALL = 256  # The cached causal mask has this many rows and keys: 256 KiB in fp32.


@cache
def flash_operators() -> tuple[Any, Any]:
    """Return torch's flash kernel for CPUs and its backward, which have no public name."""
    forward: Any = torch._scaled_dot_product_flash_attention_for_cpu
    return forward, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@cache
def _triangle(dtype: torch.dtype) -> Tensor:
    return torch.full((_SMALL, _SMALL), -torch.inf, dtype=dtype, device="cpu").triu_(1)


class Masks:
    """The additive masks of one kernel run, built on first use and shared by tiles of equal geometry."""

    def __init__(self, spec: AttentionSpec, dtype: torch.dtype) -> None:
        self._spec = spec
        self._dtype = dtype
        self._made: dict[tuple[int, int, int], Tensor] = {}
        self._diagonal: Tensor | None = None

    def of(self, tiles: Tiles) -> Tensor | None:
        """Return ``[rows, keys]`` with 0 for visible and -inf for hidden keys; None if all are visible."""
        left, right = self._spec.left, self._spec.right
        if tiles.sees_all(left, right):
            return None
        last = tiles.shift + tiles.rows
        if left < 0 and right == 0 and tiles.shift >= 0 and max(last, tiles.keys) <= _SMALL:
            return _triangle(self._dtype)[tiles.shift : last, : tiles.keys]
        if left < 0 and right == 0 and tiles.shift == tiles.keys - tiles.rows:
            return self._ending_on_diagonal(tiles.rows, tiles.keys)
        key = (tiles.rows, tiles.keys, tiles.shift)
        if key not in self._made:
            hidden = hidden_pairs(*key, left=left, right=right)
            self._made[key] = torch.zeros_like(hidden, dtype=self._dtype).masked_fill_(hidden, -torch.inf)
        return self._made[key]

    def _ending_on_diagonal(self, rows: int, keys: int) -> Tensor:
        """Return a tile's causal mask as the last rows and keys of the largest mask made so far."""
        have = (0, 0) if self._diagonal is None else tuple(self._diagonal.shape)
        if self._diagonal is None or rows > have[0] or keys > have[1]:
            height, width = max(rows, have[0]), max(keys, have[1])
            whole = torch.full((height, width), -torch.inf, dtype=self._dtype, device="cpu")
            self._diagonal = whole.triu_(width - height + 1)
        return self._diagonal[self._diagonal.shape[0] - rows :, self._diagonal.shape[1] - keys :]


def hidden_pairs(rows: int, keys: int, shift: int, *, left: int, right: int) -> Tensor:
    """Return bool ``[rows, keys]``, True for keys hidden from query i, which is at key i + shift."""
    distance = torch.arange(keys, device="cpu") - torch.arange(rows, device="cpu")[:, None] - shift
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    return hidden


def flash_forward(
    q_BRHD: Tensor, k_BKGD: Tensor, v_BKGD: Tensor, *, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend within every tile by torch's flash kernel; return out ``[B, R, H, D]`` and lse ``[B, R, H]``."""
    dtype = q_BRHD.dtype
    k, v = (_share_heads(x, q_BRHD.shape[2]) for x in (k_BKGD, v_BKGD))
    # CPUs multiply fp16 slowly; in fp32 the forward takes 0.45 of the time (benchmarks/attention_kernels.py).
    wide = torch.float32 if dtype == torch.float16 else dtype
    heads_first = (x.to(wide).transpose(1, 2) for x in (q_BRHD, k, v))
    flash, _ = flash_operators()
    out, lse = flash(*heads_first, 0.0, causal, attn_mask=_expand(mask), scale=scale)
    return out.transpose(1, 2).to(dtype), lse.transpose(1, 2)


def flash_backward(
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
    """Return the gradients of ``flash_forward`` for q, k and v, in their shapes and dtype."""
    narrow, wide = q_BRHD.dtype, torch.promote_types(q_BRHD.dtype, torch.float32)
    k, v = (_share_heads(x, q_BRHD.shape[2]) for x in (k_BKGD, v_BKGD))
    heads_first = (x.to(wide).transpose(1, 2) for x in (grad, q_BRHD, k, v, out))
    mask = _expand(mask if mask is None else mask.to(wide))
    _, flash_backward = flash_operators()
    grads = flash_backward(*heads_first, lse_BRH.transpose(1, 2), 0.0, causal, attn_mask=mask, scale=scale)
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    kv_heads = k_BKGD.shape[2]
    return dq.to(narrow), _sum_heads(dk, kv_heads).to(narrow), _sum_heads(dv, kv_heads).to(narrow)


@cache
def kernel_shares_heads() -> bool:
    """Return whether torch's kernel supports fewer key-value than query heads, forward and backward."""
    q, kv = torch.ones(1, 2, 1, 8), torch.ones(1, 1, 1, 8)
    try:
        flash, flash_backward = flash_operators()
        out, lse = flash(q, kv, kv, 0.0, False)
        grads = flash_backward(q, q, kv, kv, out, lse, 0.0, False)
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


def product_forward(
    q_BRHD: Tensor, k_BKGD: Tensor, v_BKGE: Tensor, *, mask: Tensor | None, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Attend within every tile by matrix products; return out ``[B, R, H, E]`` and lse ``[B, R, H]``.

    The additive mask is ``[R, K]`` or ``[B, 1, 1, R, K]``; softcap 0 means no softcap.
    """
    with torch.autocast(q_BRHD.device.type, enabled=False):  # autograd runs the backward without it, too
        weights = _scores(q_BRHD, k_BKGD, scale / (softcap or 1.0))
        if softcap:
            weights = weights.tanh_().mul_(softcap)
        if mask is not None:
            weights += mask
        top = weights.amax(-1, keepdim=True)
        total = weights.sub_(top).exp_().sum(-1, keepdim=True)
        out = (weights @ _kv_heads(v_BKGE, weights.dtype)) / total
    return _rows(out).to(q_BRHD.dtype), _rows(total.log() + top)[..., 0]


def product_backward(
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
    """Return the gradients of ``product_forward``; those for k and v keep the dtype of lse."""
    groups, wide = q_BRHD.shape[2] // k_BKGD.shape[2], lse_BRH.dtype
    with torch.autocast(grad.device.type, enabled=False):
        scores = _scores(q_BRHD, k_BKGD, scale / (softcap or 1.0))
        tanh = scores.tanh_() if softcap else None
        weights = scores if tanh is None else tanh * softcap
        if mask is not None:
            weights += mask
        weights = weights.sub_(_q_heads(lse_BRH.unsqueeze(-1), wide, groups)).exp_()
        dout = _q_heads(grad, wide, groups)
        delta = torch.linalg.vecdot(dout, _q_heads(out, wide, groups)).unsqueeze(-1)
        dv = (weights.transpose(-1, -2) @ dout).sum(2)
        dscores = (dout @ _kv_heads(v_BKGE, wide).transpose(-1, -2)).sub_(delta).mul_(weights)
        dscores *= scale if tanh is None else tanh.square_().neg_().add_(1.0).mul_(scale)
        dq = dscores @ _kv_heads(k_BKGD, wide)
        dk = (dscores.transpose(-1, -2) @ _q_heads(q_BRHD, wide, groups)).sum(2)
    return _rows(dq).to(q_BRHD.dtype), dk.transpose(1, 2), dv.transpose(1, 2)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Compute ``scale * q . k`` as ``[B, G, H / G, R, K]``."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    queries = _q_heads(q, wide, q.shape[2] // k.shape[2])
    return (queries @ _kv_heads(k, wide).transpose(-1, -2)).mul_(scale)


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
