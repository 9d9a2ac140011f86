"""CUDA tensors -> torch.nn.attention.varlen: the flash-attn 2 that comes with torch, first choice on a GPU.

Without sinks the public function runs; what it takes differs between torch 2.10 and 2.13, so its signature
decides. With sinks, and for context parallelism, the two aten operators under it run, whose backward takes
the lse it is given.

Legend: T slots, S sequences, H query heads, G key-value heads, D head size, E value head size.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_thd.attention.kernels import raw
from lightning_thd.attention.kernels.raw import Saved
from lightning_thd.attention.spec import AttentionSpec, Offsets


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
    value_size, heads = v.shape[2], q.shape[1]
    q, k, v = raw.widen(AtenFlash(), q, k, v)
    options = public_options(spec, shared_heads=k.shape[1] != heads)
    if options is None:  # this torch's public function takes less than the operators under it
        return raw.attend(AtenFlash(), q, k, v, at, spec, None)[..., :value_size]
    out: Tensor = _varlen_attn()(q, k, v, at.cu_q, at.cu_kv, at.max_q, at.max_kv, **options)
    return out[..., :value_size]


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
