"""THD tensors and offsets -> attention on the CPU, with memory linear in T.

Attention runs on torch's flash kernel for CPUs. Its causal mask is top-left, it needs E == D, and an empty
sequence crashes the process. With a softcap, matrix products are used instead. Plain eager code calls Python
functions here; torch.compile and dispatch modes see one torch operator.
Legend: T slots, H query heads, D head size, E value head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import pad

from lightning_thd.attention.kernels import cpu_tiles
from lightning_thd.attention.kernels.cpu_plan import GROUPED_ELEMENTS, SHORT, Piece, Plan, Tiles, make_plan
from lightning_thd.attention.kernels.cpu_tiles import Masks
from lightning_thd.attention.kernels.raw import (
    Gradients,
    OutLse,
    Saved,
    any_size,
    apply_sinks,
    sinks_gradient,
)
from lightning_thd.attention.spec import AttentionSpec
from lightning_thd.boundaries.kernel_call import KernelCall, read_offsets

_SCORES = 1 << 21  # the largest number of scores in one call with a softcap: 8 MiB in fp32
# If a call would return more elements than this per tensor, its heads are split: 8 MiB in fp32.
_CALL_ELEMENTS = 1 << 21
# Up to _FEW short sequences get a kernel call each, in 0.6 to 1.1 times the time of one padded call. So do
# more, if lengths differ, threads <= heads, and the mean of tokens x heads x head size is _LARGE or more.
_FEW, _LARGE = 24, 4096


class CpuAttention:
    """The CPU kernel for one batch and kind of layer; it checks offsets and plans its calls only once."""

    __slots__ = ("_offsets", "_spec", "_work")

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, at: KernelCall, spec: AttentionSpec) -> None:
        offsets_q, offsets_kv = at.checked(q.shape[0], k.shape[0])
        self._offsets, self._spec = at, spec
        self._work = _work(offsets_q, offsets_kv, spec, q.shape[1:], k.shape[1], v.shape[2], q.dtype)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend to THD tensors of the shapes and dtype given at construction; return ``[Tq, H, E]``."""
        if not is_plain(q, k, v):
            return operator(q, k, v, self._offsets, self._spec, sinks)
        if self._work.few is not None and sinks is None:
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            return _attend_few(q, k, v, self._work.few, self._spec.scale)[0]
        out: Tensor = _Attention.apply(self._work, q, k, v, sinks)  # type: ignore[no-untyped-call]
        return out

    def heads_first(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend to ``[1, H, T, D]``; return ``[1, T, H, E]``."""
        if self._work.few is not None and sinks is None and is_plain(q, k, v):
            return _attend_few(q, k, v, self._work.few, self._spec.scale)
        q, k, v = q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1)
        return self(q, k, v, sinks).unsqueeze(0)


def attend(
    q: Tensor, k: Tensor, v: Tensor, at: KernelCall, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """Attend on the CPU: directly if the call is plain eager code, else through the torch operator."""
    if is_plain(q, k, v):
        return CpuAttention(q, k, v, at, spec)(q, k, v, sinks)
    return operator(q, k, v, at, spec, sinks)


def operator(
    q: Tensor, k: Tensor, v: Tensor, at: KernelCall, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """Call the torch operator, which torch.compile and dispatch modes do not look into; meta tensors work."""
    _refuse_forward_mode(q, k, v, sinks)
    offsets = (at.cu_seqlens_q, at.cu_seqlens_kv)
    out: Tensor = varlen_attention_cpu(
        q, k, v, *offsets, sinks, at.max_seqlen_q, at.max_seqlen_kv, *_options(spec)
    )[0]
    return out


def _options(spec: AttentionSpec) -> tuple[int, int, float, float]:
    return spec.left, spec.right, spec.scale, spec.softcap


def is_plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether a call is eager CPU code without a dispatch mode, transform or tensor subclass."""
    return (
        type(q) is type(k) is type(v) is Tensor
        and q.is_cpu
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and getattr(forward_ad, "_current_level", -1) < 0
    )


def _refuse_forward_mode(*tensors: Tensor | None) -> None:
    """Refuse forward-mode tensors, whose tangent torch would silently set to 0 in a custom operator."""
    if torch.compiler.is_compiling() or getattr(forward_ad, "_current_level", 0) < 0:
        return
    tangent_of: Any = forward_ad.unpack_dual
    if any(x is not None and tangent_of(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "Attention on packs has no forward-mode derivative (torch.func.jvp). Use the backward pass."
        )


class _Few(NamedTuple):
    """Sequences that get one kernel call each: their numbers of queries and keys, and which are causal."""

    rows: list[int]
    keys: list[int]
    causal: list[bool]


class _Work:
    """The kernel calls for one batch's offsets and one kind of layer, forward and backward."""

    def __init__(
        self,
        offsets_q: tuple[int, ...],
        offsets_kv: tuple[int, ...],
        spec: AttentionSpec,
        width: tuple[int, int],  # query heads, head size
        kv_heads: int,
        value_size: int,
        dtype: torch.dtype,
    ) -> None:
        self.offsets_q, self.offsets_kv, self.spec = offsets_q, offsets_kv, spec
        self._heads, self._size = heads, size = width
        self._plans: dict[bool, Plan] = {}
        count = len(offsets_q) - 1
        equal = len({b - a for a, b in pairwise(offsets_q)}) == 1  # usually one call can run them all
        large = offsets_q[-1] * heads * size >= _LARGE * count
        one_each = count <= _FEW or (large and not equal and torch.get_num_threads() <= heads)
        shares = heads == kv_heads or cpu_tiles.kernel_shares_heads()
        exact = dtype in (torch.float32, torch.float64)  # torch's own backward in half precision is slow
        fits = one_each and shares and exact and value_size == size and not spec.softcap
        self.few = _few(offsets_q, offsets_kv, spec) if fits else None

    def plan(self, *, by_keys: bool) -> Plan:
        """Return the calls of the forward or, if ``by_keys`` is set, of the backward, which splits keys."""
        if by_keys not in self._plans:
            heads, width, spec = self._heads, self._heads * self._size, self.spec
            # A call on one sequence uses one thread per head; if some would idle, group longer sequences too.
            longest = GROUPED_ELEMENTS // width if torch.get_num_threads() <= heads else SHORT
            self._plans[by_keys] = make_plan(
                self.offsets_q,
                self.offsets_kv,
                left=spec.left,
                right=spec.right,
                by_keys=by_keys,
                max_cells=max(1, _SCORES // heads) if spec.softcap else None,
                grouped=min(SHORT, longest),
                width=width,
            )
        return self._plans[by_keys]


_work = lru_cache(maxsize=32)(_Work)


def _few(offsets_q: tuple[int, ...], offsets_kv: tuple[int, ...], spec: AttentionSpec) -> _Few | None:
    """Return the sequences if each has 1 to SHORT queries and keys and needs no mask tensor, else None."""
    rows, keys = ([b - a for a, b in pairwise(cu)] for cu in (offsets_q, offsets_kv))
    if min(*rows, *keys) == 0 or max(*rows, *keys) > SHORT:
        return None
    causal = []
    for num_rows, num_keys in zip(rows, keys, strict=True):
        no_left_side = spec.left < 0 or spec.left >= num_keys - 1
        sees_all = no_left_side and (spec.right < 0 or spec.right >= num_rows - 1)
        if not sees_all and not (no_left_side and spec.right == 0 and num_rows == num_keys):
            return None
        causal.append(not sees_all)
    return _Few(rows, keys, causal)


def _attend_few(q: Tensor, k: Tensor, v: Tensor, few: _Few, scale: float) -> Tensor:
    """Attend to ``[1, H, T, D]`` with one kernel call per sequence; return contiguous ``[1, T, H, E]``."""
    if q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    flash, _ = cpu_tiles.flash_operators()
    if len(few.rows) == 1:
        whole: Tensor = flash(q, k, v, 0.0, few.causal[0], scale=scale)[0]
        return whole.transpose(1, 2)
    parts = q.split_with_sizes(few.rows, 2), k.split_with_sizes(few.keys, 2), v.split_with_sizes(few.keys, 2)
    found = []
    for q, k, v, causal in zip(*parts, few.causal, strict=True):
        found.append(flash(q, k, v, 0.0, causal, scale=scale)[0].transpose(1, 2))
    return torch.cat(found, 1)


def _few_forward(few: _Few, q: Tensor, k: Tensor, v: Tensor, scale: float) -> OutLse:
    """Return out and lse; out equals that of ``_attend_few`` bit for bit."""
    parts = _heads_first(q, few.rows), _heads_first(k, few.keys), _heads_first(v, few.keys)
    each = zip(*parts, few.causal, strict=True)
    flash, _ = cpu_tiles.flash_operators()
    found = [flash(q, k, v, 0.0, causal, scale=scale) for q, k, v, causal in each]
    out, lse = (torch.cat(x, 2)[0].transpose(0, 1) for x in zip(*found, strict=True))
    return out.contiguous(), lse.contiguous()


def _few_backward(few: _Few, by_q: tuple[Tensor, ...], by_k: tuple[Tensor, ...], scale: float) -> Gradients:
    grads, queries, outs, sums = (_heads_first(x, few.rows) for x in by_q)
    keys, values = (_heads_first(x, few.keys) for x in by_k)
    each = zip(grads, queries, keys, values, outs, sums, few.causal, strict=True)
    _, flash_backward = cpu_tiles.flash_operators()
    found = [flash_backward(*x, 0.0, causal, scale=scale) for *x, causal in each]
    dq, dk, dv = (torch.cat(x, 2)[0].transpose(0, 1).contiguous() for x in zip(*found, strict=True))
    return dq, dk, dv


def _heads_first(x: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
    """Split ``[T, H, ...]`` into one ``[1, H, length, ...]`` per sequence."""
    return x.transpose(0, 1).unsqueeze(0).split_with_sizes(lengths, 2)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _Work, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        out, lse = _forward(work, q, k, v)
        if sinks is not None:
            out, lse = apply_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.work = work
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        work: _Work = ctx.work
        if torch.is_grad_enabled():  # with create_graph=True; this operator refuses a second derivative
            offsets_q, offsets_kv = (
                torch.tensor(cu, dtype=torch.int32) for cu in (work.offsets_q, work.offsets_kv)
            )
            found = _backward_op(
                grads[0], q, k, v, out, lse, offsets_q, offsets_kv, *_options(work.spec), sinks
            )
            return None, *found[:3], None if sinks is None else found[3]
        dsinks = None if sinks is None else sinks_gradient(grads[0], out, lse, sinks)
        return None, *_backward(work, grads[0], q, k, v, out, lse), dsinks


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
) -> OutLse:
    """Run ``forward`` as a torch operator; lengths are tensor data, so new lengths do not recompile."""
    spec = AttentionSpec(left=left, right=right, scale=scale, softcap=softcap)
    at = KernelCall(cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
    offsets_q, offsets_kv = at.checked(q.shape[0], k.shape[0])
    return forward(q, k, v, offsets_q, offsets_kv, spec=spec, sinks=sinks)


@varlen_attention_cpu.register_fake
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> OutLse:
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
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv and the gradient of the sinks (empty without sinks), as one operator."""
    spec = AttentionSpec(left=left, right=right, scale=scale, softcap=softcap)
    offsets = read_offsets(cu_seqlens_q)[0], read_offsets(cu_seqlens_kv)[0]
    dsinks = q.new_empty(0) if sinks is None else sinks_gradient(grad_out, out, lse, sinks)
    return *backward(grad_out, Saved(q, k, v, out, lse), *offsets, spec=spec), dsinks


@_backward_op.register_fake
def _backward_fake(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, ...]:
    dsinks = q.new_empty(0) if given[-1] is None else given[-1].new_empty(given[-1].shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_kv, sinks, _, _, *ctx.options = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv, sinks)


def _differentiate(ctx: Any, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv, sinks = ctx.saved_tensors
    found = _backward_op(grad_out, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv, *ctx.options, sinks)
    return *found[:3], None, None, None if sinks is None else found[3], *([None] * 6)


varlen_attention_cpu.register_autograd(_differentiate, setup_context=_setup_context)


def _second_derivative(*_: Any) -> tuple[None, ...]:
    raise NotImplementedError(
        "Attention on packs has no second derivative. Use padded rows with attn_implementation='eager'."
    )


_backward_op.register_autograd(_second_derivative)


class CpuKernel:
    """The CPU kernel as a ``RawKernel``, for partial results to be merged and for gathered keys."""

    sizes = staticmethod(any_size)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: KernelCall, spec: AttentionSpec) -> OutLse:
        """Return attention output and log-sum-exp of packed sequences; lse is fp64 for fp64 inputs."""
        return forward(q, k, v, at.cu_seqlens_q.tolist(), at.cu_seqlens_kv.tolist(), spec=spec)

    def backward(self, grad: Tensor, saved: Saved, at: KernelCall, spec: AttentionSpec) -> Gradients:
        """Return dq, dk and dv from the output's gradient and the saved tensors of the forward."""
        return backward(grad, saved, at.cu_seqlens_q.tolist(), at.cu_seqlens_kv.tolist(), spec=spec)


def forward(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THE: Tensor,
    offsets_q: Sequence[int],
    offsets_kv: Sequence[int],
    *,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
) -> OutLse:
    """Return out ``[Tq, H, E]`` and fp32 or fp64 lse ``[Tq, H]``; 0 and -inf if a query sees no key."""
    out, lse = _forward(_work_of(q_THD, k_THD, v_THE, offsets_q, offsets_kv, spec), q_THD, k_THD, v_THE)
    return (out, lse) if sinks is None else apply_sinks(out, lse, sinks)


def _work_of(
    q: Tensor, k: Tensor, v: Tensor, offsets_q: Sequence[int], offsets_kv: Sequence[int], spec: AttentionSpec
) -> _Work:
    return _work(tuple(offsets_q), tuple(offsets_kv), spec, q.shape[1:], k.shape[1], v.shape[2], q.dtype)


def _forward(work: _Work, q: Tensor, k: Tensor, v: Tensor) -> OutLse:
    q, k, v = (_dense_rows(x) for x in (q, k, v))
    if work.few is not None:
        return _few_forward(work.few, q, k, v, work.spec.scale)
    plan, spec = work.plan(by_keys=False), work.spec
    if plan.at_once is not None and q.shape[2] == v.shape[2] and q.dtype != torch.float16:
        (call,) = plan.at_once.calls  # the call runs on views, so no row is copied
        given = (call.q.view(q), call.k.view(k), call.k.view(v))
        causal = call.is_top_left(spec.left, spec.right)
        parts = cpu_tiles.flash_forward(*given, causal=causal, mask=None, scale=spec.scale)
        out, lse = (x.flatten(0, 1).contiguous() for x in parts)
        return out, lse
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    for start, stop in plan.blank_q:
        out[start:stop] = 0.0
        lse[start:stop] = -torch.inf
    kernel = _Kernel(spec, Masks(spec, lse.dtype), q.shape[2], v.shape[2])
    for piece in plan.pieces:
        _piece_forward(piece, kernel, (q, k, v), (out, lse))
    return out, lse


def backward(
    grad: Tensor, saved: Saved, offsets_q: Sequence[int], offsets_kv: Sequence[int], *, spec: AttentionSpec
) -> Gradients:
    """Return the gradients of ``forward`` with respect to q, k and v, contiguous and in their dtypes."""
    return _backward(_work_of(*saved[:3], offsets_q, offsets_kv, spec), grad, *saved)


def _backward(
    work: _Work, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Gradients:
    by_q = tuple(_dense_rows(x) for x in (grad, q, out, lse))
    by_k = tuple(_dense_rows(x) for x in (k, v))
    if work.few is not None:
        return _few_backward(work.few, by_q, by_k, work.spec.scale)
    plan, spec = work.plan(by_keys=True), work.spec
    if plan.at_once is not None and q.shape[2] == v.shape[2] and q.dtype == lse.dtype:
        (call,) = plan.at_once.calls
        grad, q, out, lse = (call.q.view(x) for x in by_q)
        k, v = (call.k.view(x) for x in by_k)
        causal = call.is_top_left(spec.left, spec.right)
        grads = cpu_tiles.flash_backward(grad, q, k, v, out, lse, causal=causal, mask=None, scale=spec.scale)
        dq, dk, dv = (x.flatten(0, 1).contiguous() for x in grads)
        return dq, dk, dv
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, *by_k))
    for x, blanks in ((dq, plan.blank_q), (dk, plan.blank_k), (dv, plan.blank_k)):
        for start, stop in blanks:
            x[start:stop] = 0.0
    kernel = _Kernel(spec, Masks(spec, lse.dtype), q.shape[2], v.shape[2])
    for piece in plan.pieces:
        for heads, kv_heads in _head_slices(piece.q.total, q, k, at_least=torch.get_num_threads()):
            q_part, k_part = [_heads(x, heads) for x in by_q], [_heads(x, kv_heads) for x in by_k]
            grads = _heads(dq, heads), _heads(dk, kv_heads), _heads(dv, kv_heads)
            _piece_backward(piece, kernel, q_part, k_part, grads)
    return dq, dk, dv


def _piece_forward(
    piece: Piece, kernel: _Kernel, inputs: tuple[Tensor, ...], results: tuple[Tensor, Tensor]
) -> None:
    q, k, v = piece.q.take(inputs[0]), *(kernel.widen(piece.k.take(x)) for x in inputs[1:])
    for call in piece.calls:
        for heads, kv_heads in _head_slices(call.q.count * call.rows, q, k, at_least=1):
            k_part, v_part = (call.k.view(_heads(x, kv_heads)) for x in (k, v))
            parts = kernel.forward(call.q.view(_heads(q, heads)), k_part, v_part, call)
            for x, part in zip(results, parts, strict=True):
                piece.q.put_tiles(_heads(x, heads), part, call.q)
            del parts, part  # free these results before the next call allocates its own


def _piece_backward(
    piece: Piece, kernel: _Kernel, by_q: list[Tensor], by_k: list[Tensor], grads: tuple[Tensor, ...]
) -> None:
    wide = by_q[3].dtype
    by_q, by_k = [piece.q.take(x).to(wide) for x in by_q], [piece.k.take(x).to(wide) for x in by_k]
    if piece.q.lengths is not None:  # padded queries get weights of 0 and gradients of 0
        piece.q.fill_padding(by_q[0], 0.0)
        piece.q.fill_padding(by_q[3], torch.inf)
    if piece.once:
        _backward_once(piece, kernel, by_q, by_k, grads)
        return
    piece_rows = (piece.q, piece.k, piece.k)
    in_place = [rows.span is not None and x.dtype == wide for x, rows in zip(grads, piece_rows, strict=True)]
    sums = [
        rows.take(x).zero_() if direct else x.new_zeros(rows.total, *x.shape[1:], dtype=wide)
        for x, rows, direct in zip(grads, piece_rows, in_place, strict=True)
    ]
    for call in piece.calls:
        parts = kernel.backward([call.q.view(x) for x in by_q], [call.k.view(x) for x in by_k], call)
        for total, part, tiles in zip(sums, parts, (call.q, call.k, call.k), strict=True):
            tiles.add(total, part)
        del parts, part  # free these results before the next call allocates its own
    for grad, total, rows, direct in zip(grads, sums, piece_rows, in_place, strict=True):
        if not direct:
            rows.put(grad, total)


def _backward_once(
    piece: Piece, kernel: _Kernel, by_q: list[Tensor], by_k: list[Tensor], grads: tuple[Tensor, ...]
) -> None:
    """Run the backward of a piece that has every key in exactly one tile, so that only dq is summed."""
    dq = None
    for call in piece.calls:
        parts = kernel.backward([call.q.view(x) for x in by_q], [call.k.view(x) for x in by_k], call)
        if dq is None:  # the first call contains every query
            dq = parts[0].flatten(0, 1)
        else:
            call.q.add(dq, parts[0])
        for grad, part in zip(grads[1:], parts[1:], strict=True):
            piece.k.put_tiles(grad, part, call.k)
        del parts, part  # free these results before the next call allocates its own
    assert dq is not None
    piece.q.put(grads[0], dq)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Runs tiles with the flash kernel or, if there is a softcap, with matrix products."""

    spec: AttentionSpec
    masks: Masks
    head_size: int
    value_size: int

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Tiles) -> OutLse:
        spec = self.spec
        if spec.softcap:
            options: Any = {"mask": self.masks.of(call), "scale": spec.scale, "softcap": spec.softcap}
            return cpu_tiles.product_forward(q, k, v, **options)
        causal = call.is_top_left(spec.left, spec.right)
        mask = None if causal else self.masks.of(call)
        q, k, v = (self.widen(x) for x in (q, k, v))
        out, lse = cpu_tiles.flash_forward(q, k, v, causal=causal, mask=mask, scale=spec.scale)
        return out[..., : self.value_size], lse

    def backward(self, by_q: list[Tensor], by_k: list[Tensor], call: Tiles) -> Gradients:
        (grad, q, out, lse), (k, v), spec = by_q, by_k, self.spec
        if spec.softcap:
            options: Any = {"mask": self.masks.of(call), "scale": spec.scale, "softcap": spec.softcap}
            return cpu_tiles.product_backward(grad, q, k, v, out, lse, **options)
        causal = call.is_top_left(spec.left, spec.right)
        mask = None if causal else self.masks.of(call)
        grad, q, k, v, out = (self.widen(x) for x in (grad, q, k, v, out))
        options = {"causal": causal, "mask": mask, "scale": spec.scale}
        dq, dk, dv = cpu_tiles.flash_backward(grad, q, k, v, out, lse, **options)
        return dq[..., : self.head_size], dk[..., : self.head_size], dv[..., : self.value_size]

    def widen(self, x: Tensor) -> Tensor:
        """Append zeros to the heads; this changes neither the scores nor the columns that are kept."""
        missing = max(self.head_size, self.value_size) - x.shape[-1]
        return x if missing == 0 or self.spec.softcap else pad(x, (0, missing))


def _dense_rows(x: Tensor) -> Tensor:
    """Return a contiguous copy if the last stride is not 1; the kernels accept any other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _heads(x: Tensor, heads: slice | None) -> Tensor:
    return x if heads is None else x[:, heads]


def _head_slices(
    num_rows: int, q: Tensor, k: Tensor, *, at_least: int
) -> Iterator[tuple[slice | None, slice | None]]:
    """Yield slices of q's and of k's heads, so that each call needs little memory; None is all heads."""
    kv_heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    elements = num_rows * groups * q.shape[2]  # the query elements per key-value head
    step = max(1, _CALL_ELEMENTS // elements, -(-at_least // groups))
    if step >= kv_heads:
        yield None, None
        return
    for start in range(0, kv_heads, step):
        stop = min(start + step, kv_heads)
        yield slice(start * groups, stop * groups), slice(start, stop)
