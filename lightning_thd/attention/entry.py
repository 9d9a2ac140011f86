"""varlen_attention: packed q, k, v and boundaries -> packed output, by the fastest or a given kernel.

Only the CPU kernel checks the values of cu_seqlens, because reading them from a GPU would wait for the GPU.
Legend: T slots, S sequences, H query heads, G key-value heads, D head size, E value head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_thd._checks import instance, whole_number
from lightning_thd.attention.context_parallel import context_parallel_attention
from lightning_thd.attention.kernels import cpu, raw, te, torch_cuda
from lightning_thd.attention.spec import AttentionSpec, Window, cached_spec, make_spec
from lightning_thd.attention.support import RAW, Backend, Kernel, Request, choose
from lightning_thd.boundaries import Boundaries, KernelCall
from lightning_thd.flops.listen import LISTENERS, AttentionCall, attending


def varlen_attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    cu_seqlens_q: Tensor | Boundaries,
    cu_seqlens_kv: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    *,
    causal: bool = True,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attend within every sequence of a pack and never across.

    ``varlen_attention(q, k, v, batch.boundaries)`` is the form for a batch. It is also right if ranks share
    the pack, if sequences share prefixes, and, without ``causal``, if sequences are padded. With offsets of
    your own, ``varlen_attention(q, k, v, cu_seqlens, max_seqlen_q=longest)`` attends from a sequence to
    itself; give both sides for cross-attention.

    Args:
        q_THD: ``[Tq, H, D]`` float; every row belongs to a sequence. Autocast casts q, k and v.
        k_THD: ``[Tkv, G, D]``; G divides H.
        v_THD: ``[Tkv, G, E]``; E may differ from D.
        cu_seqlens_q: a batch's ``boundaries``. Or offsets, int32 ``[S + 1]`` on the device of q, first entry
            0, last Tq. Sequences may be empty.
        cu_seqlens_kv: int32 ``[S + 1]``, first entry 0, last Tkv; by default ``cu_seqlens_q``.
        max_seqlen_q: longest query sequence or more, an int known on the host; needed with offsets.
        max_seqlen_kv: longest key sequence or more; by default ``max_seqlen_q``.
        causal: hide later keys; query i of Lq is at key ``i + Lkv - Lq`` (bottom-right, as in flash-attn).
        window: None for no window. With ``causal``, an int W lets a query see the last W keys, its own
            included. ``(left, right)`` counts keys before and after its own, -1 for all; ``causal``
            sets right to 0. So an int W means ``(W - 1, 0)``.
        scale: factor of the scores; None means ``D ** -0.5``.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None leaves them unchanged.
        sinks: ``[H]`` logits of one extra key, with a value of zero, that every query sees; or None.
        backend: a backend of ``support_table()``, or "auto" for the fastest that supports this call.

    Returns:
        ``[Tq, H, E]`` in q's dtype or autocast's; 0 for a query that sees no key.
    """
    if isinstance(cu_seqlens_q, Boundaries):
        if not (cu_seqlens_kv is None and max_seqlen_q is None and max_seqlen_kv is None):
            raise TypeError(
                "varlen_attention got boundaries and, beside them, offsets or a longest length. Pass "
                "varlen_attention(q, k, v, batch.boundaries), or offsets of queries and keys."
            )
        boundaries = cu_seqlens_q
        _check_slots(q_THD, k_THD, boundaries)
        call = boundaries.call(causal=causal)
    else:
        call = _call_of_offsets(cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)

    return attend_call(
        q_THD,
        k_THD,
        v_THD,
        call,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        backend=backend,
    )


def attend_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: KernelCall,
    *,
    causal: bool,
    window: Window,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    backend: Backend = "auto",
) -> Tensor:
    """Check and run one kernel call, after the exchange of keys between ranks, if it has one."""
    if isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor):
        q, k, v = _autocast(q, k, v)  # what is no tensor is refused next
    _check_call(q, k, v, call)
    _check_sinks(sinks, q)
    spec = make_spec(q.shape[2], causal=causal, window=window, scale=scale, softcap=softcap)

    if LISTENERS and not torch.compiler.is_compiling():
        with attending(AttentionCall.of(q, k, v, call, spec)):
            return _attend(q, k, v, call, spec, sinks, backend)
    return _attend(q, k, v, call, spec, sinks, backend)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: KernelCall,
    spec: AttentionSpec,
    sinks: Tensor | None,
    backend: Backend,
) -> Tensor:
    """Run a checked call by the way that its keys need: an exchange between ranks, a gather, or neither."""
    if call.exchange is not None:
        out: Tensor = _attend_shard(q, k, v, call, spec, sinks, backend)
        return out

    request = describe(q, v, spec, sinks)
    if call.keys is None:
        return run(choose(backend, request), q, k, v, call, spec, sinks)
    return raw.attend(_gathering_kernel(backend, request), q, k, v, call, spec, sinks)


def _gathering_kernel(backend: Backend, request: Request) -> raw.RawKernel:
    """Return the kernel of a call whose keys are gathered; "auto" finds one before Transformer Engine."""
    name = choose(backend, request)
    if name == "te":
        raise ValueError("backend='te' gathers no keys of shared prefixes. Use backend='auto'.")
    return RAW[name]


def _check_slots(q: Any, k: Any, boundaries: Boundaries) -> None:
    """Raise if q or k has other slots than the boundaries; values are compared with keys later."""
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[0] == boundaries.slots:
            continue
        if x.shape[1] == boundaries.slots:
            raise ValueError(
                f"{name} has shape {list(x.shape)}, and the boundaries have {boundaries.slots} slots; want "
                f"[slots, heads, head size], slots first. Pass {name}.transpose(0, 1), and the same of the "
                "others. The result is [slots, heads, head size] too."
            )
        raise ValueError(
            f"{name} has {x.shape[0]} rows, but the boundaries have {boundaries.slots} slots. Pass the "
            "boundaries of this batch, and q, k and v of all its slots."
        )


def _call_of_offsets(
    cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor | None, max_seqlen_q: int | None, max_seqlen_kv: int | None
) -> KernelCall:
    """Return the kernel call for a user's offsets; keys have those of queries unless they have their own."""
    if max_seqlen_q is None:
        raise TypeError(
            "varlen_attention got cu_seqlens_q without max_seqlen_q, the longest sequence, an int known on "
            "the host. Pass it, or pass batch.boundaries, which holds both."
        )
    longest_q = _host_int(max_seqlen_q, "max_seqlen_q")
    longest_kv = longest_q
    if max_seqlen_kv is not None:
        longest_kv = _host_int(max_seqlen_kv, "max_seqlen_kv")
    if cu_seqlens_kv is None:
        cu_seqlens_kv = cu_seqlens_q
    return KernelCall(cu_seqlens_q, cu_seqlens_kv, longest_q, longest_kv)


# q, k and v ``[1, H, T, D]`` (as in transformers), sinks or None -> ``[1, T, H, E]``.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class Bound(NamedTuple):
    """The attention of one call, for use with a counter of FLOPs and without.

    Both ways run the same operators: a checkpointed layer may run without a counter, and again with one.
    """

    attend: Attend
    call: KernelCall
    spec: AttentionSpec

    def attend_and_report(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend as ``attend`` does, and tell the counters that listen."""
        q_THD = q.squeeze(0).transpose(0, 1)
        k_THD = k.squeeze(0).transpose(0, 1)
        v_THD = v.squeeze(0).transpose(0, 1)
        with attending(AttentionCall.of(q_THD, k_THD, v_THD, self.call, self.spec)):
            return self.attend(q, k, v, sinks)


def bind(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: KernelCall,
    *,
    causal: bool,
    window: int | tuple[int, int] | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None = None,
    backend: Backend = "auto",
) -> Bound:
    """Check a call once for all layers of a kind; return functions for tensors of its shapes."""
    q_cast, k_cast, v_cast = _autocast(q, k, v)
    casts = q_cast is not q or k_cast is not k or v_cast is not v
    _check_call(q_cast, k_cast, v_cast, call)
    if sinks is not None:
        _check_sinks(sinks, q_cast)

    spec = cached_spec(q_cast.shape[2], causal=causal, window=window, scale=scale, softcap=softcap)
    attend = _bind(q_cast, k_cast, v_cast, call, spec, sinks, backend)
    if casts:
        attend = _casting(attend, q_cast.dtype)
    return Bound(attend, call, spec)


def _casting(attend: Attend, dtype: torch.dtype) -> Attend:
    """Wrap a bound function so that it casts its tensors first."""
    return lambda q, k, v, sinks: attend(q.to(dtype), k.to(dtype), v.to(dtype), sinks)


def _bind(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: KernelCall,
    spec: AttentionSpec,
    sinks: Tensor | None,
    backend: Backend,
) -> Attend:
    """Return the function of a checked call, with the fewest layers of Python around its kernel."""
    if call.exchange is not None:
        return _heads_first(lambda q, k, v, sinks: _attend_shard(q, k, v, call, spec, sinks, backend))

    request = describe(q, v, spec, sinks)
    if call.keys is not None:
        kernel = _gathering_kernel(backend, request)
        return _heads_first(lambda q, k, v, sinks: raw.attend(kernel, q, k, v, call, spec, sinks))

    name = choose(backend, request)
    if name == "cpu" and cpu.is_plain(q, k, v):
        return cpu.CpuAttention(q, k, v, call, spec).heads_first

    sizes = (q.shape[2], v.shape[2])
    needs_no_padding = raw.one_size(*sizes) == sizes
    if name == "torch" and sinks is None and needs_no_padding:
        return torch_cuda.bind(q.shape[0], call, spec)
    return _heads_first(lambda q, k, v, sinks: run(name, q, k, v, call, spec, sinks))


def _heads_first(attend: Attend) -> Attend:
    """Wrap a function of THD tensors for transformers: take ``[1, H, T, D]``, return ``[1, T, H, E]``."""

    def attend_heads_first(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        q_THD = q.squeeze(0).transpose(0, 1)
        k_THD = k.squeeze(0).transpose(0, 1)
        v_THD = v.squeeze(0).transpose(0, 1)
        return attend(q_THD, k_THD, v_THD, sinks).unsqueeze(0)

    return attend_heads_first


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_shard(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: KernelCall,
    spec: AttentionSpec,
    sinks: Tensor | None,
    backend: Backend,
) -> Tensor:
    """Attend from this rank's queries to the keys of all ranks that share the pack."""

    def attend(q: Tensor, k: Tensor, v: Tensor, call: KernelCall, *, sinks: Tensor | None) -> Tensor:
        return run(choose(backend, describe(q, v, spec, sinks)), q, k, v, call, spec, sinks)

    def raw_kernel() -> raw.RawKernel:  # partial results are merged by their log-sum-exp
        return RAW[choose(backend, describe(q, v, spec, sinks, needs_lse=True))]

    return context_parallel_attention(attend, raw_kernel, q, k, v, call.exchange, spec=spec, sinks=sinks)


def describe(
    q: Tensor, v: Tensor, spec: AttentionSpec, sinks: Tensor | None, *, needs_lse: bool = False
) -> Request:
    """Collect the features of a call that decide which kernels can run it."""
    capability = _capability(q.device.index or 0) if q.is_cuda else None
    return Request(
        device="cpu" if q.is_meta else q.device.type,  # meta tensors take the kernels of CPUs
        dtype=q.dtype,
        head_size=q.shape[2],
        value_size=v.shape[2],
        spec=spec,
        sinks=sinks is not None,
        needs_lse=needs_lse,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        capability=capability,
    )


def run(
    name: Kernel, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """Run a given kernel on checked tensors, without context parallelism; return ``[Tq, H, E]``."""
    if name == "cpu":
        return cpu.attend(q, k, v, call, spec, sinks)
    if name == "torch":
        return torch_cuda.attend(q, k, v, call, spec, sinks)
    if name == "te":
        self_attention = call.cu_seqlens_q is call.cu_seqlens_kv
        attended: Tensor = te.attend(q, k, v, call, spec, self_attention=self_attention)
        return attended
    return raw.attend(RAW[name], q, k, v, call, spec, sinks)


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast q, k and v to autocast's dtype if autocast is on and q is not fp64, as torch's attention does."""
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device) or q.dtype == torch.float64:
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _capability(index: int) -> int:
    return _capability_of(index)


@cache
def _capability_of(index: int) -> int:
    return torch.cuda.get_device_capability(index)[0]


def _check_call(q: Any, k: Any, v: Any, call: KernelCall) -> None:
    """Raise if q, k, v and offsets do not fit each other, without reading a value from the device."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            instance(x, name, Tensor, advice="Pass a tensor [slots, heads, head size].")
        if x.dim() != 3:
            advice = ""
            if x.dim() == 4:
                advice = (
                    f" Of [1, heads, slots, head size], which torch's attention takes, pass "
                    f"{name}[0].transpose(0, 1); of [1, slots, heads, head size], {name}[0]."
                )
            raise ValueError(
                f"{name} has shape {list(x.shape)}; want three dimensions, [slots, heads, head size].{advice}"
            )
        if not x.is_floating_point():
            raise ValueError(f"{name} is {x.dtype}; want a floating dtype.")

    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q is {q.dtype}, k is {k.dtype} and v is {v.dtype}; want one dtype: cast them.")
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"k has shape {list(k.shape)} and v {list(v.shape)}; want the same slots and heads.")
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q has head size {q.shape[2]} and k {k.shape[2]}; want the same.")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(
            f"{q.shape[1]} query heads are not divisible by {k.shape[1]} key-value heads; want a multiple."
        )

    cu_seqlens_q = call.cu_seqlens_q
    cu_seqlens_kv = call.cu_seqlens_kv
    _check_offsets(cu_seqlens_q, q.device, "q")
    if cu_seqlens_kv is not cu_seqlens_q:
        _check_offsets(cu_seqlens_kv, q.device, "kv")
    if cu_seqlens_q.shape != cu_seqlens_kv.shape:
        raise ValueError(
            f"cu_seqlens_q has {cu_seqlens_q.shape[0]} entries and cu_seqlens_kv {cu_seqlens_kv.shape[0]}; "
            "want one sequence of keys for every sequence of queries (it may be empty)."
        )

    if k.device != q.device or v.device != q.device:
        raise ValueError(f"q is on {q.device}, k on {k.device} and v on {v.device}; want one device.")


def _check_offsets(cu_seqlens: Any, device: torch.device, side: str) -> None:
    name = f"cu_seqlens_{side}"
    if not isinstance(cu_seqlens, Tensor):
        instance(cu_seqlens, name, Tensor, advice="Make it with seqlens.cu_seqlens_from_lengths.")
    if cu_seqlens.device != device:
        raise ValueError(f"{name} is on {cu_seqlens.device} but q is on {device}; move it once per batch.")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype != torch.int32:
        raise ValueError(
            f"{name} is {cu_seqlens.dtype} {list(cu_seqlens.shape)}; want int32 [S + 1], S at least 1."
        )


def _host_int(max_seqlen: int, name: str) -> int:
    if type(max_seqlen) is int and max_seqlen >= 0:
        return max_seqlen
    return whole_number(max_seqlen, name, advice="Pass an int known on the host: batch.max_seqlen.")


def _check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    if sinks is None:
        return
    instance(sinks, "sinks", Tensor, advice="Pass one float per query head, or None.")
    if sinks.shape != (q.shape[1],) or sinks.device != q.device or not sinks.is_floating_point():
        raise ValueError(
            f"sinks is {sinks.dtype} {list(sinks.shape)} on {sinks.device}; want one float for each of the "
            f"{q.shape[1]} query heads, on {q.device}."
        )
