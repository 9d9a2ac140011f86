"""CUDA tensors -> attention by one of torch's own two kernels: flash-attn 2 or the memory-efficient kernel.

The flash kernel is called through aten operators, because the function in ``torch.nn.attention.varlen`` costs
120 us of Python. The memory-efficient kernel also supports fp32 and older devices. It needs as many key-value
heads as query heads, and has neither softcap nor windows that look ahead. Its results for queries without
keys and keys without queries are undefined, so this module overwrites them.
Legend: T slots, S sequences, H query heads, D head size, E value head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_thd.attention.kernels import raw
from lightning_thd.attention.kernels.raw import Gradients, OutLse, Saved
from lightning_thd.attention.spec import AttentionSpec
from lightning_thd.boundaries import KernelCall


class AtenFlash:
    """The raw kernel of torch itself: aten's flash attention for CUDA."""

    sizes = staticmethod(raw.one_size)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, spec: AttentionSpec) -> OutLse:
        """Run the forward operator; return lse as ``[Tq, H]``."""
        out, lse, *_ = _flash_forward(q, k, v, flash_call(q.shape[0], call, spec))
        return out, lse.t()

    def backward(self, grad: Tensor, saved: Saved, call: KernelCall, spec: AttentionSpec) -> Gradients:
        """Run the backward operator; dropout is 0, so the random state is not used."""
        flash = flash_call(saved.q.shape[0], call, spec)
        seed = torch.zeros(2, dtype=torch.uint64, device=grad.device)
        offset = torch.empty(0, device=grad.device)
        gradients: Gradients = torch.ops.aten._flash_attention_backward(
            grad,
            *saved[:4],
            saved.lse.t().contiguous(),
            *flash[:4],
            0.0,  # dropout
            flash.causal,
            seed,
            offset,
            scale=flash.scale,
            window_size_left=flash.left,
            window_size_right=flash.right,
        )
        return gradients


class FlashCall(NamedTuple):
    """What the flash operators get besides tensors of tokens: offsets, longest lengths, and the mask."""

    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    max_seqlen_q: int
    max_seqlen_kv: int
    causal: bool  # False with a window, whose sides then define the mask
    scale: float
    left: int
    right: int


def flash_call(num_queries: int, call: KernelCall, spec: AttentionSpec) -> FlashCall:
    """Return the operators' arguments for a call on so many rows of queries."""
    call, spec = raw.for_flash2(num_queries, call, spec)
    causal = spec.left < 0 and spec.right == 0
    return FlashCall(*call.arguments, causal, spec.scale, spec.left, spec.right)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, ...]:
    """Return out ``[Tq, H, D]``, lse ``[H, Tq]`` and more; torch has a formula for the gradients of out."""
    results: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        *call[:4],
        0.0,  # dropout
        call.causal,
        False,  # no mask for debugging
        scale=call.scale,
        window_size_left=call.left,
        window_size_right=call.right,
    )
    return results


def bind(
    num_queries: int, call: KernelCall, spec: AttentionSpec
) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """Return a function of ``[1, H, T, D]`` that ignores sinks, for q, k, v of one supported head size."""
    flash = flash_call(num_queries, call, spec)
    operator = torch.ops.aten._flash_attention_forward
    arguments = (*flash[:4], 0.0, flash.causal, False)  # without dropout, and no mask for debugging
    scale = flash.scale
    left = flash.left
    right = flash.right

    def attend_heads_first(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        q = q.squeeze(0).transpose(0, 1)
        k = k.squeeze(0).transpose(0, 1)
        v = v.squeeze(0).transpose(0, 1)
        if q.stride(2) != 1 or k.stride(2) != 1 or v.stride(2) != 1:
            q = q.contiguous()
            k = k.contiguous()
            v = v.contiguous()

        results = operator(q, k, v, *arguments, scale=scale, window_size_left=left, window_size_right=right)
        out: Tensor = results[0].unsqueeze(0)
        return out

    return attend_heads_first


def attend(
    q: Tensor, k: Tensor, v: Tensor, call: KernelCall, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """Attend by the flash kernel, with padding to a head size that it supports; return ``[Tq, H, E]``."""
    if sinks is not None:
        return raw.attend(AtenFlash(), q, k, v, call, spec, sinks)

    value_size = v.shape[2]
    q, k, v = raw.widen(AtenFlash(), q, k, v)
    out = _flash_forward(q, k, v, flash_call(q.shape[0], call, spec))[0]
    return out if out.shape[2] == value_size else out[..., :value_size]


class AtenEfficient:
    """The raw kernel ``aten::_efficient_attention_forward`` and its backward."""

    def sizes(self, head_size: int, value_size: int) -> tuple[int, int] | None:
        """Return the next multiples of 8, which the aligned kernels of every dtype support."""
        return -(-head_size // 8) * 8, -(-value_size // 8) * 8

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, spec: AttentionSpec) -> OutLse:
        """Call the forward operator on one row; its lse is ``[S, H, max_q]``, max_q rounded up to 32s."""
        heads = q.shape[1]
        out, lse, *_ = torch.ops.aten._efficient_attention_forward(
            q.unsqueeze(0),
            _share_heads(k, heads).unsqueeze(0),
            _share_heads(v, heads).unsqueeze(0),
            None,  # no additive mask
            *call.arguments,
            0.0,  # dropout
            _mask_number(spec),
            compute_log_sumexp=True,
            scale=spec.scale,
            window_size=_window_size(spec),
        )
        sequence, position = _locate_rows(call.cu_seqlens_q, q.shape[0])
        out = out.squeeze(0)
        lse = lse[sequence, :, position]

        if call.cu_seqlens_q is not call.cu_seqlens_kv:
            blind = _blind_queries(call, sequence, position, spec)
            out = out.masked_fill(blind[:, None, None], 0.0)
            lse = lse.masked_fill(blind[:, None], -torch.inf)
        return out, lse

    def backward(self, grad: Tensor, saved: Saved, call: KernelCall, spec: AttentionSpec) -> Gradients:
        """Call the backward operator; in deterministic mode, one split of keys fixes the order of sums."""
        q, k, v, out, lse = saved
        heads = q.shape[1]
        kv_heads = k.shape[1]
        sequence, position = _locate_rows(call.cu_seqlens_q, q.shape[0])
        dq, dk, dv = _efficient_backward(
            grad.unsqueeze(0),
            q.unsqueeze(0),
            _share_heads(k, heads).unsqueeze(0),
            _share_heads(v, heads).unsqueeze(0),
            out.unsqueeze(0),
            *call.arguments,
            _lse_by_sequence(lse, sequence, position, call),
            _mask_number(spec),
            1 if torch.are_deterministic_algorithms_enabled() else None,
            spec.scale,
            _window_size(spec),
        )
        dq = dq.squeeze(0)
        dk = dk.squeeze(0)
        dv = dv.squeeze(0)

        if call.cu_seqlens_q is not call.cu_seqlens_kv:
            blind = _blind_queries(call, sequence, position, spec)[:, None, None]
            unseen = _unseen_keys(call, k.shape[0], spec)[:, None, None]
            dq = dq.masked_fill(blind, 0.0)
            dk = dk.masked_fill(unseen, 0.0)
            dv = dv.masked_fill(unseen, 0.0)
        return dq, _sum_heads(dk, kv_heads), _sum_heads(dv, kv_heads)


def _lse_by_sequence(lse_TH: Tensor, sequence: Tensor, position: Tensor, call: KernelCall) -> Tensor:
    """Return lse as the backward operator takes it: ``[S, H, max_q]``, max_q rounded up to 32s."""
    num_sequences = call.cu_seqlens_q.shape[0] - 1
    longest = -(-call.max_seqlen_q // 32) * 32
    shape = (num_sequences, longest, lse_TH.shape[1])

    padded = lse_TH.new_full(shape, torch.inf, dtype=torch.float32)
    padded = padded.index_put((sequence, position), lse_TH.float())
    return padded.transpose(1, 2).contiguous()


# torch 2.11 to 2.13 give torch.compile a wrong signature of the operator that this one calls.
@torch.library.custom_op(
    "lightning_thd::efficient_attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor cu_seqlens_q, "
    "Tensor cu_seqlens_kv, SymInt max_seqlen_q, SymInt max_seqlen_kv, "
    "Tensor lse, int mask, int? splits, float scale, int? window)"
    " -> (Tensor, Tensor, Tensor)",
)
def _efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    lse: Tensor,
    mask: int,
    splits: int | None,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of one row of heads, as an operator with the right signature."""
    random_state = torch.zeros((), dtype=torch.int64, device=grad.device)  # not used: dropout is 0
    dq, dk, dv, *_ = torch.ops.aten._efficient_attention_backward(
        grad,
        q,
        k,
        v,
        None,  # no additive mask
        out,
        cu_seqlens_q,
        cu_seqlens_kv,
        max_seqlen_q,
        max_seqlen_kv,
        lse,
        0.0,  # dropout
        random_state,
        random_state,
        mask,
        False,  # no gradient of an additive mask
        scale=scale,
        num_splits_key=splits,
        window_size=window,
    )
    return dq, dk, dv


@_efficient_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _mask_number(spec: AttentionSpec) -> int:
    """Return the kernel's number for a mask: 0 for none, 2 for causal from the bottom right."""
    return 2 if spec.causal else 0


def _window_size(spec: AttentionSpec) -> int | None:
    """Return the number of keys that a query's window has, its own included; None without a window."""
    return spec.left + 1 if spec.left >= 0 else None


def _share_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat key-value heads, so that every query head has its own."""
    if x.shape[1] == heads:
        return x
    return x.repeat_interleave(heads // x.shape[1], 1)


def _sum_heads(x: Tensor, kv_heads: int) -> Tensor:
    """Sum the gradients of the copies that ``_share_heads`` made."""
    if x.shape[1] == kv_heads:
        return x
    return x.view(x.shape[0], kv_heads, -1, x.shape[2]).sum(2)


def _locate_rows(cu_seqlens: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return each row's sequence and its position in the sequence, without reading the device."""
    row = torch.arange(num_rows, device=cu_seqlens.device, dtype=torch.int32)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    position = (row - cu_seqlens[sequence]).long()
    return sequence, position


def _blind_queries(call: KernelCall, sequence: Tensor, position: Tensor, spec: AttentionSpec) -> Tensor:
    """Mark queries that see no key: those of sequences without keys or, if causal, before the first key."""
    num_keys = call.cu_seqlens_kv.diff()[sequence]
    num_queries = call.cu_seqlens_q.diff()[sequence]
    blind = num_keys == 0
    if spec.causal:
        blind = blind | (position + num_keys < num_queries)
    return blind


def _unseen_keys(call: KernelCall, total: int, spec: AttentionSpec) -> Tensor:
    """Mark keys that no query sees: those of sequences without queries, and those before all windows."""
    sequence, position = _locate_rows(call.cu_seqlens_kv, total)
    num_keys = call.cu_seqlens_kv.diff()[sequence]
    num_queries = call.cu_seqlens_q.diff()[sequence]
    unseen = num_queries == 0
    if spec.left >= 0:
        unseen = unseen | (position < num_keys - num_queries - spec.left)
    return unseen
