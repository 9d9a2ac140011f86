"""q, k, v in THD and host offsets -> out and log-sum-exp on the CPU, in memory linear in T.

Legend: T slots, S sequences, H query heads, G key-value heads, D head size, E value head size.
Runs on torch's own flash kernel for CPUs, which is top-left causal, wants E == D, and kills the process on an empty
sequence; the tiles of ``plan`` never ask it for anything else. One operator, opaque to torch.compile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_thd.attention import tiled
from lightning_thd.attention.plan import Tile, make_tiles
from lightning_thd.attention.spec import AttentionSpec

_forward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def forward(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THE: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    *,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend within every sequence.

    Args:
        q_THD: ``[Tq, H, D]`` float.
        k_THD: ``[Tkv, G, D]``.
        v_THE: ``[Tkv, G, E]``.
        cu_seqlens_q: int ``[S + 1]`` on the CPU.
        cu_seqlens_kv: int ``[S + 1]`` on the CPU.
        spec: window, scale and softcap.
        sinks: ``[H]`` logits of a key without a value that every query sees, or None.

    Returns:
        out ``[Tq, H, E]`` in the dtype of q and lse ``[H, Tq]`` in fp32 (fp64 for fp64), the sink included; a query
        that sees nothing has out 0 and lse -inf.
    """
    tiles = make_tiles(cu_seqlens_q.tolist(), cu_seqlens_kv.tolist(), left=spec.left, right=spec.right)
    out = q_THD.new_zeros(*q_THD.shape[:2], v_THE.shape[2])
    lse = q_THD.new_full((q_THD.shape[1], q_THD.shape[0]), -torch.inf, dtype=_wide(q_THD.dtype))
    for tile in tiles:
        q, k, v = _slices(tile, q_THD, k_THD, v_THE)
        part, part_lse = _tile_forward(q, k, v, tile, spec)
        out[tile.q0 : tile.q1] = part
        lse[:, tile.q0 : tile.q1] = part_lse
    if sinks is not None:
        out, lse = apply_sinks(out, lse, sinks)
    return out, lse


def backward(
    grad_out: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THE: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    *,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``forward`` to q, k and v.

    out and lse may hold more than these keys gave (a sink, other ranks' keys): the weights are recomputed from lse.
    """
    tiles = make_tiles(cu_seqlens_q.tolist(), cu_seqlens_kv.tolist(), left=spec.left, right=spec.right)
    dq = torch.zeros_like(q_THD)
    wide = _wide(q_THD.dtype)
    dk = torch.zeros_like(k_THD, dtype=wide)
    dv = torch.zeros_like(v_THE, dtype=wide)
    lse = lse.masked_fill(lse == -torch.inf, 0.0)  # such a row sees no key: any finite number gives weight 0
    for tile in tiles:
        q, k, v = _slices(tile, q_THD, k_THD, v_THE)
        rows = slice(tile.q0, tile.q1)
        part_q, part_k, part_v = _tile_backward(grad_out[rows], q, k, v, out[rows], lse[:, rows], tile, spec)
        dq[rows] = part_q
        dk[tile.k0 : tile.k1] += part_k
        dv[tile.k0 : tile.k1] += part_v
    return dq, dk.to(k_THD.dtype), dv.to(v_THE.dtype)


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Give every query one more key, of logit ``sinks[h]`` and value zero.

    Args:
        out: ``[Tq, H, E]`` without sinks.
        lse: ``[H, Tq]`` without sinks.
        sinks: ``[H]``.

    Returns:
        out and lse with them.
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return out * (lse - total).exp().t().unsqueeze(2).to(out.dtype), total


def sinks_gradient(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Gradient to ``sinks``, from out and lse which include them."""
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(2).t()
    weight = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -(weight * delta).sum(1).to(sinks.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _slices(tile: Tile, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q[tile.q0 : tile.q1], k[tile.k0 : tile.k1], v[tile.k0 : tile.k1]


def _bhld(x: Tensor, size: int) -> Tensor:
    """``[L, H, E]`` to the kernel's ``[1, H, L, size]``; the kernel wants one head size, zeros change nothing."""
    if x.shape[2] < size:
        x = torch.nn.functional.pad(x, (0, size - x.shape[2]))
    return x.transpose(0, 1).unsqueeze(0)


def _mask(tile: Tile, dtype: torch.dtype) -> Tensor | None:
    if tile.sees_all or tile.is_triangle:
        return None
    hidden = tiled.hidden(tile)
    return torch.zeros(hidden.shape, dtype=_wide(dtype)).masked_fill_(hidden, -torch.inf)[None, None]


def _tile_forward(q: Tensor, k: Tensor, v: Tensor, tile: Tile, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    if spec.softcap:
        return tiled.forward(q, k, v, tile, spec)
    size = max(q.shape[2], v.shape[2])
    out, lse = _forward_kernel(
        _bhld(q, size),
        _bhld(k, size),
        _bhld(v, size),
        0.0,
        tile.is_triangle,
        attn_mask=_mask(tile, q.dtype),
        scale=spec.scale,
    )
    out, lse = out[0].transpose(0, 1)[..., : v.shape[2]], lse[0]
    if not (tile.sees_all or tile.is_triangle):
        lse = lse.masked_fill(tiled.hidden(tile).all(1), -torch.inf)
    return out, lse


def _tile_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    if spec.softcap:
        return tiled.backward(grad, q, k, v, out, lse, tile, spec)
    size = max(q.shape[2], v.shape[2])
    grads = _backward_kernel(
        _bhld(grad, size),
        _bhld(q, size),
        _bhld(k, size),
        _bhld(v, size),
        _bhld(out, size),
        lse.unsqueeze(0),
        0.0,
        tile.is_triangle,
        attn_mask=_mask(tile, q.dtype),
        scale=spec.scale,
    )
    dq, dk, dv = (grad[0].transpose(0, 1) for grad in grads)
    return dq[..., : q.shape[2]], dk[..., : q.shape[2]], dv[..., : v.shape[2]]
