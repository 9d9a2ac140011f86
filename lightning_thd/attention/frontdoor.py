"""varlen_attention: packed q, k, v and offsets -> packed output, on the fastest kernel that supports a call.

Legend: T slots, S sequences, H query heads, G key-value heads, D head size, E value head size.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from lightning_thd.attention.checks import check_sinks, check_tensors, host_int, refuse_forward_mode
from lightning_thd.attention.context_parallel import context_parallel_attention
from lightning_thd.attention.kernels import flash, kernel, te, torch_varlen
from lightning_thd.attention.kernels.cpu import CpuKernel
from lightning_thd.attention.kernels.cpu_op import varlen_attention_cpu
from lightning_thd.attention.kernels.kernel import Offsets
from lightning_thd.attention.spec import AttentionSpec, Window, make_spec
from lightning_thd.attention.support import Backend, Kernel, Request, choose
from lightning_thd.parallel.context import layout


def varlen_attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    *,
    causal: bool = True,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attend within every sequence of a pack and never across.

    Args:
        q_THD: ``[Tq, H, D]`` float; every row belongs to a sequence. Under autocast q, k and v are cast to
            its dtype.
        k_THD: ``[Tkv, G, D]``; G divides H.
        v_THD: ``[Tkv, G, E]``; E may differ from D.
        cu_seqlens_q: int32 ``[S + 1]`` on the device of q, first entry 0, last Tq. Sequences may be empty.
        cu_seqlens_kv: int32 ``[S + 1]``, first entry 0, last Tkv.
        max_seqlen_q: longest query sequence or more, an int known on the host.
        max_seqlen_kv: longest key sequence or more.
        causal: hide later keys. Where a sequence has Lq queries and Lkv keys, query i stands at key
            ``i + Lkv - Lq`` (bottom-right, as flash-attn), with or without causal.
        window: None; or with ``causal`` an int W: a query sees the last W keys, its own included, as Hugging
            Face's ``sliding_window``; or ``(left, right)`` keys before and after its own, -1 for all, as
            flash-attn's ``window_size``: W is ``(W - 1, 0)``.
        scale: of the scores; None is ``D ** -0.5``.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None is none.
        sinks: ``[H]`` logits of one more key, without a value, that every query sees; or None.
        backend: "cpu", "torch", "flash", "te", or "auto": the first that runs exactly this
            (``support_table()``).

    Returns:
        ``[Tq, H, E]`` in the dtype of q; 0 for a query that sees no key. One sequence of one token returns v.
    """
    if isinstance(q_THD, Tensor) and isinstance(k_THD, Tensor) and isinstance(v_THD, Tensor):
        q_THD, k_THD, v_THD = _autocast(q_THD, k_THD, v_THD)
    check_tensors(q_THD, k_THD, v_THD, cu_seqlens_q, cu_seqlens_kv)
    check_sinks(sinks, q_THD)
    spec = make_spec(q_THD.shape[2], causal=causal, window=window, scale=scale, softcap=softcap)
    longest_q, longest_kv = host_int(max_seqlen_q, "max_seqlen_q"), host_int(max_seqlen_kv, "max_seqlen_kv")
    at = Offsets(cu_seqlens_q, cu_seqlens_kv, longest_q, longest_kv)
    if layout.in_use:  # some batch of this process is cut for context parallelism
        out: Tensor = _attend_shard(q_THD, k_THD, v_THD, at, spec, sinks, backend)
        return out
    return _attend(q_THD, k_THD, v_THD, at, spec, sinks, backend)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, at: Offsets, spec: AttentionSpec, sinks: Tensor | None, backend: Backend
) -> Tensor:
    name = choose(backend, describe(q, v, spec, sinks))
    return run(name, q, k, v, at, spec, sinks)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_shard(
    q: Tensor, k: Tensor, v: Tensor, at: Offsets, spec: AttentionSpec, sinks: Tensor | None, backend: Backend
) -> Tensor:
    """Attend across context-parallel ranks if the offsets are a shard's, else on this rank alone."""
    shard = layout.layout_of(at.cu_q)
    if shard is None:
        layout.refuse_unknown_offsets(at.cu_q, q.shape[0])
        return _attend(q, k, v, at, spec, sinks, backend)
    run = partial(_attend, spec=spec, backend=backend)
    raw = partial(_raw_kernel, q, v, spec, sinks, backend)
    return context_parallel_attention(run, raw, q, k, v, layout=shard, spec=spec, sinks=sinks)


def _raw_kernel(
    q: Tensor, v: Tensor, spec: AttentionSpec, sinks: Tensor | None, backend: Backend
) -> kernel.RawKernel:
    """Choose a kernel that returns the log-sum-exp, so that context parallelism can merge its results."""
    name = choose(backend, describe(q, v, spec, sinks, needs_lse=True))
    if name == "cpu":
        return CpuKernel()
    return torch_varlen.AtenFlash() if name == "torch" else flash.KERNELS[int(name[-1])]


def describe(
    q: Tensor, v: Tensor, spec: AttentionSpec, sinks: Tensor | None, *, needs_lse: bool = False
) -> Request:
    """Collect the features of a call that decide which kernels can run it."""
    return Request(
        device=_device_type(q),
        dtype=q.dtype,
        head_size=q.shape[2],
        value_size=v.shape[2],
        spec=spec,
        sinks=sinks is not None,
        needs_lse=needs_lse,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        capability=_capability(q.device.index or 0) if q.is_cuda else None,
    )


def run(
    name: Kernel, q: Tensor, k: Tensor, v: Tensor, at: Offsets, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """Run a given kernel on checked tensors, without context parallelism.

    Returns:
        ``[Tq, H, E]``.
    """
    if name == "torch":
        return torch_varlen.attend(q, k, v, at, spec, sinks)
    if name == "te":
        attended: Tensor = te.attend(q, k, v, at, spec, self_attention=at.cu_q is at.cu_kv)
        return attended
    if name != "cpu":
        return kernel.attend(flash.KERNELS[int(name[-1])], q, k, v, at, spec, sinks)
    refuse_forward_mode(q, k, v, sinks)
    out: Tensor
    out, _ = varlen_attention_cpu(
        q,
        k,
        v,
        at.cu_q,
        at.cu_kv,
        sinks,
        at.max_q,
        at.max_kv,
        spec.left,
        spec.right,
        spec.scale,
        spec.softcap,
    )
    return out


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast q, k and v under autocast as torch's attention does: rotary embeddings leave q and k in fp32."""
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device) or q.dtype == torch.float64:
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _device_type(x: Tensor) -> str:
    """Return the device type whose kernel is chosen: meta tensors use the CPU kernel, which infers shapes."""
    return "cpu" if x.is_meta else x.device.type


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _capability(index: int) -> int:
    return _capability_of(index)


@cache
def _capability_of(index: int) -> int:
    return torch.cuda.get_device_capability(index)[0]
