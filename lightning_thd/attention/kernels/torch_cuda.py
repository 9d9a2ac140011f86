"""CUDA tensors -> attention by one of torch's own two kernels: flash-attn 2 or the memory-efficient kernel.

The flash kernel is called through aten operators, because the function in ``torch.nn.attention.varlen`` costs
120 us of Python. The memory-efficient kernel also supports fp32 and older devices. It needs as many key-value
heads as query heads, and has neither softcap nor windows that look ahead. Its results for queries without
keys and keys without queries are undefined, so this module overwrites them.
Legend: T slots, S sequences, H query heads, D head size, E value head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_thd.attention.kernels import raw
from lightning_thd.attention.kernels.raw import Gradients, OutLse, Saved
from lightning_thd.attention.spec import AttentionSpec
from lightning_thd.boundaries import KernelCall


class AtenFlash:
    """The raw kernel of torch itself: aten's flash attention for CUDA."""

    sizes = staticmethod(raw.one_size)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: KernelCall, spec: AttentionSpec) -> OutLse:
        """Run the forward operator; return lse as ``[Tq, H]``."""
        out, lse, *_ = _flash_forward(q, k, v, at, spec)
        return out, lse.t()

    def backward(self, grad: Tensor, saved: Saved, at: KernelCall, spec: AttentionSpec) -> Gradients:
        """Run the backward operator; dropout is 0, so the random state is not used."""
        state = (torch.zeros(2, dtype=torch.uint64, device=grad.device), torch.empty(0, device=grad.device))
        tensors = (grad, *saved[:4], saved.lse.t().contiguous())
        return _flash_backward(tensors, at, spec, state)


class _Flash(torch.autograd.Function):
    """Flash attention without sinks; its backward gets lse exactly as the forward returned it.

    With ``heads_first`` it takes ``[1, H, T, D]`` and returns ``[1, T, H, D]``: a transposition inside this
    function adds no nodes to the autograd graph.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, at: KernelCall, spec: AttentionSpec, heads_first: bool
    ) -> Tensor:
        if heads_first:
            q, k, v = q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1)
            if q.stride(2) != 1 or k.stride(2) != 1 or v.stride(2) != 1:
                q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse, *state = _flash_forward(q, k, v, at, spec)[:4]
        ctx.save_for_backward(q, k, v, out, lse, at.cu_seqlens_q, at.cu_seqlens_kv, *state)
        ctx.longest, ctx.spec, ctx.heads_first = (at.max_seqlen_q, at.max_seqlen_kv), spec, heads_first
        return out.unsqueeze(0) if heads_first else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv, *state = ctx.saved_tensors
        grad = grads[0][0] if ctx.heads_first else grads[0]
        tensors = (grad.contiguous(), q, k, v, out, lse)
        at = KernelCall(cu_seqlens_q, cu_seqlens_kv, *ctx.longest)
        dq, dk, dv = _flash_backward(tensors, at, ctx.spec, state)
        if ctx.heads_first:
            dq, dk, dv = (x.transpose(0, 1).unsqueeze(0) for x in (dq, dk, dv))
        return dq, dk, dv, None, None, None


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, at: KernelCall, spec: AttentionSpec
) -> tuple[Tensor, ...]:
    """Return out ``[Tq, H, D]``, lse ``[H, Tq]``, the random state and two tensors for debugging."""
    at, spec = raw.for_flash2(q, at, spec)
    sides = {"window_size_left": spec.left, "window_size_right": spec.right}
    given = (q, k, v, *at.arguments, 0.0, is_plain_causal(spec), False)
    results: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(*given, scale=spec.scale, **sides)
    return results


def _flash_backward(
    tensors: Sequence[Tensor], at: KernelCall, spec: AttentionSpec, state: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv; ``tensors`` are the output's gradient, q, k, v, out and lse ``[H, Tq]``."""
    at, spec = raw.for_flash2(tensors[1], at, spec)
    sides = {"window_size_left": spec.left, "window_size_right": spec.right}
    given = (*tensors, *at.arguments, 0.0, is_plain_causal(spec), *state)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(*given, scale=spec.scale, **sides)
    return dq, dk, dv


def is_plain_causal(spec: AttentionSpec) -> bool:
    """Return the kernel's causal flag: it is False with a window, whose sides then define the mask."""
    return spec.left < 0 and spec.right == 0


def bind(at: KernelCall, spec: AttentionSpec) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """Return a function of ``[1, H, T, D]`` that ignores sinks, for q, k, v of one supported head size."""
    return lambda q, k, v, sinks: _Flash.apply(q, k, v, at, spec, True)  # type: ignore[no-untyped-call]


def attend(
    q: Tensor, k: Tensor, v: Tensor, at: KernelCall, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """Attend by the flash kernel, with padding to a head size that it supports; return ``[Tq, H, E]``."""
    if sinks is not None:
        return raw.attend(AtenFlash(), q, k, v, at, spec, sinks)
    value_size = v.shape[2]
    out: Tensor = _Flash.apply(*raw.widen(AtenFlash(), q, k, v), at, spec, False)  # type: ignore[no-untyped-call]
    return out if out.shape[2] == value_size else out[..., :value_size]


class AtenEfficient:
    """The raw kernel ``aten::_efficient_attention_forward`` and its backward."""

    def sizes(self, head_size: int, value_size: int) -> tuple[int, int] | None:
        """Return the next multiples of 8, which the aligned kernels of every dtype support."""
        return -(-head_size // 8) * 8, -(-value_size // 8) * 8

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: KernelCall, spec: AttentionSpec) -> OutLse:
        """Call the forward operator on one row; its lse is ``[S, H, max_q]``, max_q rounded up to 32s."""
        k, v = _share_heads(k, q.shape[1]), _share_heads(v, q.shape[1])
        rows = (x.unsqueeze(0) for x in (q, k, v))
        out, lse, *_ = torch.ops.aten._efficient_attention_forward(
            *(*rows, None, *at.arguments, 0.0, _mask(spec)), compute_log_sumexp=True, **_scores(spec)
        )
        sequence, place = _places(at.cu_seqlens_q, q.shape[0])
        out, lse = out.squeeze(0), lse[sequence, :, place]
        if at.cu_seqlens_q is not at.cu_seqlens_kv:
            blind = _blind_rows(at, sequence, place, spec)
            out, lse = out.masked_fill(blind[:, None, None], 0.0), lse.masked_fill(blind[:, None], -torch.inf)
        return out, lse

    def backward(self, grad: Tensor, saved: Saved, at: KernelCall, spec: AttentionSpec) -> Gradients:
        """Call the backward operator; in deterministic mode, one split of keys fixes the order of sums."""
        q, k, v, out, lse = saved
        heads, kv_heads = q.shape[1], k.shape[1]
        sequence, place = _places(at.cu_seqlens_q, q.shape[0])
        padded = -(-at.max_seqlen_q // 32) * 32  # the kernel expects lse with rows padded to a multiple of 32
        wide = lse.new_full((at.cu_seqlens_q.shape[0] - 1, padded, heads), torch.inf, dtype=torch.float32)
        wide = wide.index_put((sequence, place), lse.float()).transpose(1, 2).contiguous()
        rows = (x.unsqueeze(0) for x in (grad, q, _share_heads(k, heads), _share_heads(v, heads), out))
        splits = 1 if torch.are_deterministic_algorithms_enabled() else None
        options = (_mask(spec), splits, *_scores(spec).values())
        found = _efficient_backward(*rows, *at.arguments, wide, *options)
        dq, dk, dv = (x.squeeze(0) for x in found)
        if at.cu_seqlens_q is not at.cu_seqlens_kv:
            dq = dq.masked_fill(_blind_rows(at, sequence, place, spec)[:, None, None], 0.0)
            unseen = _unseen_keys(at, k.shape[0], spec)[:, None, None]
            dk, dv = dk.masked_fill(unseen, 0.0), dv.masked_fill(unseen, 0.0)
        return dq, _sum_heads(dk, kv_heads), _sum_heads(dv, kv_heads)


# torch 2.11 to 2.13 give torch.compile a wrong signature of the operator that this one calls.
@torch.library.custom_op(
    "lightning_thd::efficient_attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor cu_seqlens_q, "
    "Tensor cu_seqlens_kv, SymInt max_seqlen_q, SymInt max_seqlen_kv, "
    "Tensor lse, int mask, int? splits, float scale, int? window)"
    " -> (Tensor, Tensor, Tensor)",
)
def _efficient_backward(*given: Any) -> tuple[Tensor, ...]:
    *rows, mask, splits, scale, window = given
    seed = torch.zeros((), dtype=torch.int64, device=rows[0].device)  # not used: dropout is 0
    options = {"scale": scale, "num_splits_key": splits, "window_size": window}
    found = torch.ops.aten._efficient_attention_backward(
        *rows[:4], None, *rows[4:], 0.0, seed, seed, mask, False, **options
    )
    return tuple(found[:3])


@_efficient_backward.register_fake
def _(*given: Any, **options: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in given[1:4])


def _mask(spec: AttentionSpec) -> int:
    """Return the kernel's number for a mask: 0 for none, 2 for causal from the bottom right."""
    return 2 if spec.causal else 0


def _scores(spec: AttentionSpec) -> dict[str, Any]:
    """Return the scale, and the number of keys that a query's window has, its own included."""
    return {"scale": spec.scale, "window_size": spec.left + 1 if spec.left >= 0 else None}


def _share_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _sum_heads(x: Tensor, kv_heads: int) -> Tensor:
    return x if x.shape[1] == kv_heads else x.view(x.shape[0], kv_heads, -1, x.shape[2]).sum(2)


def _places(cu_seqlens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return each row's sequence and its position in the sequence, without reading the device."""
    row = torch.arange(rows, device=cu_seqlens.device, dtype=torch.int32)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    return sequence, (row - cu_seqlens[sequence]).long()


def _blind_rows(at: KernelCall, sequence: Tensor, place: Tensor, spec: AttentionSpec) -> Tensor:
    """Mark queries that see no key: those of sequences without keys or, if causal, before the first key."""
    keys, rows = at.cu_seqlens_kv.diff()[sequence], at.cu_seqlens_q.diff()[sequence]
    return (keys == 0) | (place + keys < rows) if spec.causal else keys == 0


def _unseen_keys(at: KernelCall, total: int, spec: AttentionSpec) -> Tensor:
    """Return which keys no query sees: those of sequences without queries, and those before all windows."""
    sequence, place = _places(at.cu_seqlens_kv, total)
    keys, rows = at.cu_seqlens_kv.diff()[sequence], at.cu_seqlens_q.diff()[sequence]
    unseen = rows == 0
    return unseen | (place < keys - rows - spec.left) if spec.left >= 0 else unseen
