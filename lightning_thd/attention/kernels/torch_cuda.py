"""CUDA tensors -> the two attention kernels that come with torch: flash-attn 2, and the memory-efficient one.

Flash, first choice on a GPU: without sinks ``torch.nn.attention.varlen`` runs; what it takes differs between
torch 2.10 and 2.13, so its signature decides. With sinks, and for context parallelism, the aten operators
under it run, whose backward takes the lse it is given.

Memory-efficient: fp32 too, and devices older than flash kernels know. It wants as many key-value as query
heads, no window that looks ahead and no softcap. Its results are undefined for rows and keys that see
nothing, so they are set here.

Legend: T slots, S sequences, H query heads, G key-value heads, D head size, E value head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_thd.attention.kernels import raw
from lightning_thd.attention.kernels.raw import Saved
from lightning_thd.attention.spec import AttentionSpec, Offsets

# q, k, v and sinks -> packed output.
Bound = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class AtenFlash:
    """The raw kernel of torch itself: aten's flash attention for CUDA."""

    sizes = staticmethod(raw.one_size)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, at: Offsets, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Call ``aten::_flash_attention_forward``."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            at.cu_q,
            at.cu_kv,
            at.max_q,
            at.max_kv,
            0.0,
            is_plain_causal(spec),
            return_debug_mask=False,
            scale=spec.scale,
            window_size_left=spec.left,
            window_size_right=spec.right,
        )
        return out, lse.t()

    def backward(
        self, grad: Tensor, saved: Saved, at: Offsets, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Call ``aten::_flash_attention_backward``; the state of a dropout that is 0 may be any tensor."""
        rng_state = torch.zeros(2, dtype=torch.uint64, device=grad.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad,
            *saved[:4],
            saved.lse.t().contiguous(),
            at.cu_q,
            at.cu_kv,
            at.max_q,
            at.max_kv,
            0.0,
            is_plain_causal(spec),
            rng_state,
            torch.empty(0, device=grad.device),
            scale=spec.scale,
            window_size_left=spec.left,
            window_size_right=spec.right,
        )
        return dq, dk, dv


def is_plain_causal(spec: AttentionSpec) -> bool:
    """Return whether the mask is causal without a window; windows are given by their two sides instead."""
    return spec.left < 0 and spec.right == 0


def attend(q: Tensor, k: Tensor, v: Tensor, at: Offsets, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    """Attend by ``torch.nn.attention.varlen``, or by the raw kernel where that has no such option."""
    if sinks is not None:
        return raw.attend(AtenFlash(), q, k, v, at, spec, sinks)
    value_size = v.shape[2]
    q, k, v = raw.widen(AtenFlash(), q, k, v)
    bound = bind(q, k, v, at, spec)
    if bound is None:  # this torch's public function takes less than the operators under it
        return raw.attend(AtenFlash(), q, k, v, at, spec, None)[..., :value_size]
    return bound(q, k, v, None)[..., :value_size]


def bind(q: Tensor, k: Tensor, v: Tensor, at: Offsets, spec: AttentionSpec) -> Bound | None:
    """Return torch's function with all but the tensors given; None for heads or options it does not take."""
    options = public_options(spec, shared_heads=k.shape[1] != q.shape[1])
    if options is None or raw.one_size(q.shape[2], v.shape[2]) != (q.shape[2], v.shape[2]):
        return None
    kernel = _varlen_attn()

    def attend_bound(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        if q.stride(2) != 1 or k.stride(2) != 1 or v.stride(2) != 1:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out: Tensor = kernel(q, k, v, at.cu_q, at.cu_kv, at.max_q, at.max_kv, **options)
        return out

    return attend_bound


def public_options(spec: AttentionSpec, *, shared_heads: bool) -> dict[str, Any] | None:
    """Translate ``spec`` to keywords of torch's ``varlen_attn``; None where this torch lacks one of them."""
    options: dict[str, Any] = {"scale": spec.scale, "window_size": (spec.left, spec.right)}
    if shared_heads:
        options["enable_gqa"] = True
    return options if all(_takes(name) for name in options) else None


def _varlen_attn() -> Any:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _takes(keyword: str) -> bool:
    return keyword in _keywords_of(_varlen_attn())


@cache
def _keywords_of(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


# The kernel's names of masks: none, and causal from the bottom right.
_NO_MASK, _CAUSAL = 0, 2


class AtenEfficient:
    """The raw kernel ``aten::_efficient_attention_forward`` and its backward."""

    def sizes(self, head_size: int, value_size: int) -> tuple[int, int] | None:
        """Return multiples of 8, which every dtype's aligned kernels take."""
        return -(-head_size // 8) * 8, -(-value_size // 8) * 8

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, at: Offsets, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Call the forward operator on one row; its lse is ``[S, H, longest]``."""
        k, v = _share_heads(k, q.shape[1]), _share_heads(v, q.shape[1])
        out, lse, *_ = torch.ops.aten._efficient_attention_forward(
            *(x.unsqueeze(0) for x in (q, k, v)),
            None,
            *_offsets(at),
            0.0,
            _CAUSAL if spec.causal else _NO_MASK,
            compute_log_sumexp=True,
            scale=spec.scale,
            window_size=_window(spec),
        )
        sequence, place = _places(at.cu_q, q.shape[0])
        out, lse = out.squeeze(0), lse[sequence, :, place]
        if at.cu_q is not at.cu_kv:
            blind = _blind_rows(at, sequence, place, spec)
            out, lse = out.masked_fill(blind[:, None, None], 0.0), lse.masked_fill(blind[:, None], -torch.inf)
        return out, lse

    def backward(
        self, grad: Tensor, saved: Saved, at: Offsets, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Call the backward operator; one split of the keys adds gradients up in a fixed order."""
        q, k, v, out, lse = saved
        heads, kv_heads = q.shape[1], k.shape[1]
        sequence, place = _places(at.cu_q, q.shape[0])
        rows = -(-at.max_q // 32) * 32  # the kernel's own stride
        wide = lse.new_full((at.cu_q.shape[0] - 1, rows, heads), torch.inf, dtype=torch.float32)
        wide = wide.index_put((sequence, place), lse.float()).transpose(1, 2).contiguous()
        no_seed = torch.zeros((), dtype=torch.int64, device=q.device)
        row, keys, values, result = (
            x.unsqueeze(0) for x in (q, _share_heads(k, heads), _share_heads(v, heads), out)
        )
        dq, dk, dv, _ = torch.ops.aten._efficient_attention_backward(
            grad.unsqueeze(0),
            *(row, keys, values, None, result),
            *_offsets(at),
            *(wide, 0.0, no_seed, no_seed),
            _CAUSAL if spec.causal else _NO_MASK,
            False,
            scale=spec.scale,
            num_splits_key=1 if torch.are_deterministic_algorithms_enabled() else None,
            window_size=_window(spec),
        )
        dq, dk, dv = dq.squeeze(0), dk.squeeze(0), dv.squeeze(0)
        if at.cu_q is not at.cu_kv:
            dq = dq.masked_fill(_blind_rows(at, sequence, place, spec)[:, None, None], 0.0)
            unseen = _unseen_keys(at, k.shape[0], spec)[:, None, None]
            dk, dv = dk.masked_fill(unseen, 0.0), dv.masked_fill(unseen, 0.0)
        return dq, _sum_heads(dk, kv_heads), _sum_heads(dv, kv_heads)


def _offsets(at: Offsets) -> tuple[Any, ...]:
    return at.cu_q, at.cu_kv, at.max_q, at.max_kv


def _window(spec: AttentionSpec) -> int | None:
    """Return how many keys a query sees, its own included."""
    return spec.left + 1 if spec.left >= 0 else None


def _share_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _sum_heads(x: Tensor, kv_heads: int) -> Tensor:
    return x if x.shape[1] == kv_heads else x.view(x.shape[0], kv_heads, -1, x.shape[2]).sum(2)


def _places(cu_seqlens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the sequence of every row and the row's place in it, without reading the device."""
    row = torch.arange(rows, device=cu_seqlens.device, dtype=torch.int32)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    return sequence, (row - cu_seqlens[sequence]).long()


def _blind_rows(at: Offsets, sequence: Tensor, place: Tensor, spec: AttentionSpec) -> Tensor:
    """Return which queries see no key: all of a sequence without keys, or those before the first key."""
    keys, rows = at.cu_kv.diff()[sequence], at.cu_q.diff()[sequence]
    return (keys == 0) | (place + keys < rows) if spec.causal else keys == 0


def _unseen_keys(at: Offsets, total: int, spec: AttentionSpec) -> Tensor:
    """Return which keys no query sees: all of a sequence without queries, or those before every window."""
    sequence, place = _places(at.cu_kv, total)
    keys, rows = at.cu_kv.diff()[sequence], at.cu_q.diff()[sequence]
    unseen = rows == 0
    return unseen | (place < keys - rows - spec.left) if spec.left >= 0 else unseen
