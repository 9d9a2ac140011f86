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
    forward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    return forward, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@cache
def _triangle(dtype: torch.dtype) -> Tensor:
    """Return the additive causal mask of a small square: small tiles take slices of it."""
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
        left = self._spec.left
        right = self._spec.right
        if tiles.sees_all(left, right):
            return None

        if left < 0 and right == 0:
            last = tiles.shift + tiles.rows
            if tiles.shift >= 0 and max(last, tiles.keys) <= _SMALL:
                return _triangle(self._dtype)[tiles.shift : last, : tiles.keys]
            if tiles.shift == tiles.keys - tiles.rows:
                return self._ending_on_diagonal(tiles.rows, tiles.keys)

        geometry = (tiles.rows, tiles.keys, tiles.shift)
        if geometry not in self._made:
            hidden = hidden_pairs(*geometry, left=left, right=right)
            mask = torch.zeros_like(hidden, dtype=self._dtype).masked_fill_(hidden, -torch.inf)
            self._made[geometry] = mask
        return self._made[geometry]

    def _ending_on_diagonal(self, rows: int, keys: int) -> Tensor:
        """Return a tile's causal mask as the last rows and keys of the largest mask made so far."""
        height, width = (0, 0) if self._diagonal is None else self._diagonal.shape
        if self._diagonal is None or rows > height or keys > width:
            height = max(rows, height)
            width = max(keys, width)
            hidden = torch.full((height, width), -torch.inf, dtype=self._dtype, device="cpu")
            self._diagonal = hidden.triu_(width - height + 1)
        return self._diagonal[height - rows :, width - keys :]


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
    heads = q_BRHD.shape[2]
    k = _share_heads(k_BKGD, heads)
    v = _share_heads(v_BKGD, heads)

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
    dtype = q_BRHD.dtype
    wide = torch.promote_types(dtype, torch.float32)
    heads = q_BRHD.shape[2]
    kv_heads = k_BKGD.shape[2]
    k = _share_heads(k_BKGD, heads)
    v = _share_heads(v_BKGD, heads)
    heads_first = (x.to(wide).transpose(1, 2) for x in (grad, q_BRHD, k, v, out))
    if mask is not None:
        mask = mask.to(wide)

    _, flash_backward = flash_operators()
    grads = flash_backward(
        *heads_first, lse_BRH.transpose(1, 2), 0.0, causal, attn_mask=_expand(mask), scale=scale
    )
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq.to(dtype), _sum_heads(dk, kv_heads).to(dtype), _sum_heads(dv, kv_heads).to(dtype)


@cache
def kernel_shares_heads() -> bool:
    """Return whether torch's kernel supports fewer key-value than query heads, forward and backward."""
    q = torch.ones(1, 2, 1, 8)
    kv = torch.ones(1, 1, 1, 8)
    flash, flash_backward = flash_operators()
    try:
        out, lse = flash(q, kv, kv, 0.0, False)
        _, _, dv = flash_backward(q, q, kv, kv, out, lse, 0.0, False)
    except RuntimeError:
        return False
    # One key of weight 1 for two heads: out is its value, and dv the sum of two gradients of 1.
    return torch.equal(out, q) and dv.shape == kv.shape and torch.equal(dv, 2 * kv)


def _share_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat key-value heads for their query heads, unless the kernel does so itself."""
    if x.shape[2] == heads or kernel_shares_heads():
        return x
    return x.repeat_interleave(heads // x.shape[2], 2)


def _sum_heads(x: Tensor, kv_heads: int) -> Tensor:
    """Sum the gradients of the copies that ``_share_heads`` made."""
    if x.shape[2] == kv_heads:
        return x
    by_kv_head: Tensor = x.unflatten(2, (kv_heads, -1))  # type: ignore[no-untyped-call]
    return by_kv_head.sum(3)


def _expand(mask: Tensor | None) -> Tensor | None:
    """Return a mask ``[R, K]`` as one for all tiles and heads."""
    return None if mask is None else mask[None, None]


def product_forward(
    q_BRHD: Tensor, k_BKGD: Tensor, v_BKGE: Tensor, *, mask: Tensor | None, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Attend within every tile by matrix products; return out ``[B, R, H, E]`` and lse ``[B, R, H]``.

    The additive mask is ``[R, K]`` or ``[B, 1, 1, R, K]``; softcap 0 means no softcap.
    """
    with torch.autocast(q_BRHD.device.type, enabled=False):  # autograd runs the backward without it, too
        # ``weights`` are scores at first and become weights in place, because a copy takes as much memory.
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
    heads_per_kv = q_BRHD.shape[2] // k_BKGD.shape[2]
    wide = lse_BRH.dtype
    with torch.autocast(grad.device.type, enabled=False):
        scores = _scores(q_BRHD, k_BKGD, scale / (softcap or 1.0))
        tanh = scores.tanh_() if softcap else None
        weights = scores if tanh is None else tanh * softcap
        if mask is not None:
            weights += mask
        weights = weights.sub_(_q_heads(lse_BRH.unsqueeze(-1), wide, heads_per_kv)).exp_()

        dout = _q_heads(grad, wide, heads_per_kv)
        delta = torch.linalg.vecdot(dout, _q_heads(out, wide, heads_per_kv)).unsqueeze(-1)
        dv = (weights.transpose(-1, -2) @ dout).sum(2)
        dscores = (dout @ _kv_heads(v_BKGE, wide).transpose(-1, -2)).sub_(delta).mul_(weights)
        if tanh is None:
            dscores *= scale
        else:  # the derivative of tanh is 1 - tanh^2
            dscores *= tanh.square_().neg_().add_(1.0).mul_(scale)
        dq = dscores @ _kv_heads(k_BKGD, wide)
        dk = (dscores.transpose(-1, -2) @ _q_heads(q_BRHD, wide, heads_per_kv)).sum(2)
    return _rows(dq).to(q_BRHD.dtype), dk.transpose(1, 2), dv.transpose(1, 2)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Compute ``scale * q . k`` as ``[B, G, H / G, R, K]``."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    queries = _q_heads(q, wide, q.shape[2] // k.shape[2])
    return (queries @ _kv_heads(k, wide).transpose(-1, -2)).mul_(scale)


def _q_heads(x: Tensor, dtype: torch.dtype, heads_per_kv: int) -> Tensor:
    """Reshape ``[B, R, H, D]`` to ``[B, G, H / G, R, D]``."""
    batch, length, heads, size = x.shape
    return (
        x.to(dtype).reshape(batch, length, heads // heads_per_kv, heads_per_kv, size).permute(0, 2, 3, 1, 4)
    )


def _kv_heads(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Reshape ``[B, K, G, D]`` to ``[B, G, 1, K, D]``."""
    return x.to(dtype).transpose(1, 2).unsqueeze(2)


def _rows(x: Tensor) -> Tensor:
    """Reshape ``[B, G, H / G, R, D]`` to ``[B, R, H, D]``."""
    return x.flatten(1, 2).transpose(1, 2)
