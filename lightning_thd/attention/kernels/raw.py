"""A raw kernel and sinks -> a differentiable attention call; context parallelism uses the same functions.

A raw kernel has a forward that returns out and lse (log-sum-exp), and a backward that recomputes the weights
from lse. If out and lse include more than the given keys (a sink or other ranks' keys), the gradients are
those of the complete attention. A sink is an extra key of every query, with a learned logit and a value of
zero (gpt_oss). It rescales out: ``lse' = log(exp(lse) + exp(sink))``, ``out' = out * exp(lse - lse')``.
Legend: T slots, Tq slots of queries, H query heads, E value head size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from lightning_thd.attention.spec import AttentionSpec
from lightning_thd.boundaries import KernelCall
from lightning_thd.flops.listen import reported

OutLse = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]  # dq, dk and dv


class Saved(NamedTuple):
    """The tensors that a kernel's backward reads; lse is +inf for a query that sees neither key nor sink."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class RawKernel(Protocol):
    """The interface of a kernel: a forward with log-sum-exp and a backward, for certain head sizes."""

    def sizes(self, head_size: int, value_size: int) -> tuple[int, int] | None:
        """Return supported head sizes that are at least the given ones, or None if there are none."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, spec: AttentionSpec) -> OutLse:
        """Return out ``[Tq, H, E]`` and lse ``[Tq, H]``. Without keys, out is 0 and lse is +inf or -inf."""

    def backward(self, grad: Tensor, saved: Saved, call: KernelCall, spec: AttentionSpec) -> Gradients:
        """Return the gradients dq, dk and dv."""


def any_size(head_size: int, value_size: int) -> tuple[int, int] | None:
    """Return both head sizes unchanged, for kernels that support all sizes."""
    return head_size, value_size


def one_size(head_size: int, value_size: int) -> tuple[int, int] | None:
    """Return one head size for q, k and v, a multiple of 8 up to 256: ``(100, 64)`` gives ``(104, 104)``."""
    size = -(-max(head_size, value_size) // 8) * 8
    return (size, size) if size <= 256 else None


def for_flash2(num_queries: int, call: KernelCall, spec: AttentionSpec) -> tuple[KernelCall, AttentionSpec]:
    """Return an equal call that flash-attn 2.8 and torch 2.13 compute as ``AttentionSpec`` defines it.

    They treat ``right >= max_kv`` as unlimited and, if left is limited, an unlimited right as max_kv.
    Their backward fails if max_kv is 0. If max_q is 1, their forward needs a query in every sequence.
    """
    if call.max_seqlen_q != 1 and call.max_seqlen_q <= call.max_seqlen_kv:
        return call, spec
    max_q = call.max_seqlen_q
    max_kv = max(call.max_seqlen_kv, 1)
    right = spec.right

    if right > 0 or right < 0 <= spec.left:
        reach = max_q - 1  # so far to the right, every query sees the last key
        if right > 0:
            reach = min(right, reach)
        if reach >= max_kv:
            right = reach
            max_kv = reach + 1

    if max_q == 1 and num_queries < call.cu_seqlens_q.shape[0] - 1:
        max_q = 2
    return call._replace(max_seqlen_q=max_q, max_seqlen_kv=max_kv), replace(spec, right=right)


def empty_gradients(saved: Saved) -> Gradients:
    """Allocate contiguous dq, dk and dv for a backward that writes into given tensors."""
    dq = torch.empty_like(saved.q, memory_format=torch.contiguous_format)
    dk = torch.empty_like(saved.k, memory_format=torch.contiguous_format)
    dv = torch.empty_like(saved.v, memory_format=torch.contiguous_format)
    return dq, dk, dv


def attend(
    kernel: RawKernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: KernelCall,
    spec: AttentionSpec,
    sinks: Tensor | None,
) -> Tensor:
    """Run a raw kernel with gradients and sinks, on the rows ``call.keys`` of k and v if there are such."""
    value_size = v.shape[2]
    q, k, v = widen(kernel, q, k, v)
    out: Tensor = _Attention.apply(kernel, q, k, v, call, spec, sinks)  # type: ignore[no-untyped-call]
    return out[..., :value_size]


def gathered(x: Tensor, rows: Tensor | None) -> Tensor:
    """Return the given rows of a tensor; None means all."""
    return x if rows is None else x.index_select(0, rows)


def _scattered(grad: Tensor, keys: Tensor | None, rows: int) -> Tensor:
    """Add the gradients of gathered rows to their rows of the whole tensor, in fp32 or wider."""
    if keys is None:
        return grad
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    total = wide.new_zeros((rows, *grad.shape[1:]))
    return total.index_add_(0, keys, wide).to(grad.dtype)


def widen(kernel: RawKernel, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Append zeros to the heads up to sizes that the kernel supports; this changes no result."""
    sizes = kernel.sizes(q.shape[2], v.shape[2])
    assert sizes is not None
    return _pad(q, sizes[0]), _pad(k, sizes[0]), _pad(v, sizes[1])


def _pad(x: Tensor, size: int) -> Tensor:
    """Append zeros to heads; the result's last stride is 1, which all kernels need."""
    if x.shape[2] != size:
        x = pad(x, (0, size - x.shape[2]))
    return x if x.stride(2) == 1 else x.contiguous()


class _Attention(torch.autograd.Function):
    """Attention by a raw kernel; only the rows of k and v are saved, and gathered again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: RawKernel,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: KernelCall,
        spec: AttentionSpec,
        sinks: Tensor | None,
    ) -> Tensor:
        keys = call.keys
        out, lse = kernel.forward(q, gathered(k, keys), gathered(v, keys), call, spec)
        lse = lse.masked_fill(lse == torch.inf, -torch.inf)  # flash-attn has +inf for queries without keys
        if sinks is not None:
            out, lse = apply_sinks(out, lse, sinks)

        ctx.save_for_backward(q, k, v, out, lse, call.cu_seqlens_q, call.cu_seqlens_kv, sinks, keys)
        ctx.kernel = kernel
        ctx.spec = spec
        ctx.longest = (call.max_seqlen_q, call.max_seqlen_kv)
        ctx.lengths = (call.q_lengths, call.kv_lengths)
        return out

    @staticmethod
    @reported
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv, sinks, keys = ctx.saved_tensors
        max_seqlen_q, max_seqlen_kv = ctx.longest
        q_lengths, kv_lengths = ctx.lengths
        call = KernelCall(
            cu_seqlens_q,
            cu_seqlens_kv,
            max_seqlen_q,
            max_seqlen_kv,
            q_lengths=q_lengths,
            kv_lengths=kv_lengths,
        )
        grad = grads[0].contiguous()
        finite = lse.masked_fill(lse == -torch.inf, torch.inf)  # queries without keys get weights of 0
        saved = Saved(q, gathered(k, keys), gathered(v, keys), out, finite)

        dq, dk, dv = ctx.kernel.backward(grad, saved, call, ctx.spec)
        dk = _scattered(dk, keys, k.shape[0])
        dv = _scattered(dv, keys, v.shape[0])
        dsinks = None
        if sinks is not None:
            dsinks = sinks_gradient(grad, out, lse, sinks)
        return None, dq, dk, dv, None, None, dsinks


def apply_sinks(out_THE: Tensor, lse_TH: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Rescale out and lse as if every query saw an extra key with the logit ``sinks[h]`` and a zero value."""
    total = torch.logaddexp(lse_TH, sinks.to(lse_TH.dtype))
    # A query without keys gives its keys no share, whatever the sink: -inf minus -inf would be NaN.
    share = (lse_TH - total).exp().masked_fill(lse_TH == -torch.inf, 0.0)
    return out_THE * share.unsqueeze(-1).to(out_THE.dtype), total


def sinks_gradient(grad_out: Tensor, out_THE: Tensor, lse_TH: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient ``[H]`` of the sinks: the sum over rows of ``-weight * (grad_out . out)``."""
    delta = torch.linalg.vecdot(grad_out.to(lse_TH.dtype), out_THE.to(lse_TH.dtype))
    # An infinite sink takes all or nothing, and inf minus inf would be NaN.
    weight = (sinks.to(lse_TH.dtype) - lse_TH).exp()
    weight = torch.where(sinks.isinf(), (sinks > 0).to(weight.dtype), weight)
    gradient: Tensor = -(weight * delta).sum(0)
    return gradient.to(sinks.dtype)
