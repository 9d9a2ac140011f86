"""The CPU kernel as one differentiable torch operator: opaque to torch.compile, known to meta tensors.

The lengths are data to it, so other lengths never compile again; only another T does, once, and is symbolic
after.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_thd.attention.checks import checked_offsets, read_offsets
from lightning_thd.attention.kernels import cpu
from lightning_thd.attention.kernels.sinks import sinks_gradient
from lightning_thd.attention.spec import AttentionSpec


@torch.library.custom_op("lightning_thd::varlen_attention_cpu", mutates_args=(), device_types="cpu")
def varlen_attention_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    sinks: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    left: int,
    right: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Run the forward of the CPU kernel as a torch operator; see ``cpu.forward`` for shapes."""
    spec = AttentionSpec(left=left, right=right, scale=scale, softcap=softcap)
    cu_q = checked_offsets(cu_seqlens_q, q.shape[0], max_seqlen_q, "q")
    cu_kv = checked_offsets(cu_seqlens_kv, k.shape[0], max_seqlen_kv, "kv")
    return cpu.forward(q, k, v, cu_q, cu_kv, spec=spec, sinks=sinks)


@varlen_attention_cpu.register_fake
def _forward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    sinks: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    left: int,
    right: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2]), q.new_empty(q.shape[0], q.shape[1], dtype=wide)


@torch.library.custom_op("lightning_thd::varlen_attention_cpu_backward", mutates_args=(), device_types="cpu")
def _backward_op(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    left: int,
    right: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    spec = AttentionSpec(left=left, right=right, scale=scale, softcap=softcap)
    cu_q, cu_kv = read_offsets(cu_seqlens_q)[0], read_offsets(cu_seqlens_kv)[0]
    return cpu.backward(grad_out, q, k, v, out, lse, cu_q, cu_kv, spec=spec)


@_backward_op.register_fake
def _backward_fake(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    left: int,
    right: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_kv, sinks, _, _, *ctx.options = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv, sinks)


def _backward(ctx: Any, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv, sinks = ctx.saved_tensors
    dq, dk, dv = _backward_op(grad_out, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv, *ctx.options)
    dsinks = None if sinks is None else sinks_gradient(grad_out, out, lse, sinks)
    return dq, dk, dv, None, None, dsinks, None, None, None, None, None, None


varlen_attention_cpu.register_autograd(_backward, setup_context=_setup_context)


def _second_derivative(*_: Any) -> tuple[None, ...]:
    raise NotImplementedError(
        "Attention on packs has no second derivative (create_graph=True). Use padded rows with "
        "attn_implementation='eager' for gradient penalties and Hessians."
    )


_backward_op.register_autograd(_second_derivative)
