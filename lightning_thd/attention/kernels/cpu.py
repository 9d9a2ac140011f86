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

from lightning_thd._modes import mode_counter, transform_test
from lightning_thd.attention.kernels import cpu_tiles
from lightning_thd.attention.kernels.cpu_plan import (
    GROUPED_ELEMENTS,
    SHORT,
    Piece,
    Plan,
    Rows,
    Tiles,
    make_plan,
)
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
from lightning_thd.flops.listen import reported

_SCORES = 1 << 21  # the largest number of scores in one call with a softcap: 8 MiB in fp32
# If a call would return more elements than this per tensor, its heads are split: 8 MiB in fp32.
_CALL_ELEMENTS = 1 << 21
# Up to _FEW short sequences get a kernel call each, in 0.6 to 1.1 times the time of one padded call. So do
# more, if lengths differ, threads <= heads, and the mean of tokens x heads x head size is _LARGE or more.
_FEW = 24
_LARGE = 4096


class CpuAttention:
    """The CPU kernel for one batch and kind of layer; it checks offsets and plans its calls only once."""

    __slots__ = ("_call", "_spec", "_work")

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, spec: AttentionSpec) -> None:
        offsets_q, offsets_kv = call.checked(q.shape[0], k.shape[0])
        self._call = call
        self._spec = spec
        self._work = _cached_work(offsets_q, offsets_kv, spec, q.shape[1:], k.shape[1], v.shape[2], q.dtype)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend to THD tensors of the shapes and dtype given at construction; return ``[Tq, H, E]``."""
        if not is_plain(q, k, v):
            return operator(q, k, v, self._call, self._spec, sinks)

        if self._work.one_by_one is not None and sinks is None:
            q = q.transpose(0, 1).unsqueeze(0)
            k = k.transpose(0, 1).unsqueeze(0)
            v = v.transpose(0, 1).unsqueeze(0)
            return _attend_one_by_one(q, k, v, self._work.one_by_one, self._spec.scale)[0]

        out: Tensor = _Attention.apply(self._work, q, k, v, sinks)  # type: ignore[no-untyped-call]
        return out

    def heads_first(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend to ``[1, H, T, D]``; return ``[1, T, H, E]``."""
        if self._work.one_by_one is not None and sinks is None and is_plain(q, k, v):
            return _attend_one_by_one(q, k, v, self._work.one_by_one, self._spec.scale)

        q_THD = q[0].transpose(0, 1)
        k_THD = k[0].transpose(0, 1)
        v_THD = v[0].transpose(0, 1)
        return self(q_THD, k_THD, v_THD, sinks).unsqueeze(0)


def attend(
    q: Tensor, k: Tensor, v: Tensor, call: KernelCall, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """Attend on the CPU: directly if the call is plain eager code, else through the torch operator."""
    if is_plain(q, k, v):
        return CpuAttention(q, k, v, call, spec)(q, k, v, sinks)
    return operator(q, k, v, call, spec, sinks)


def operator(
    q: Tensor, k: Tensor, v: Tensor, call: KernelCall, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """Call the torch operator, which torch.compile and dispatch modes do not look into; meta tensors work."""
    _refuse_forward_mode(q, k, v, sinks)
    out: Tensor
    out, _ = varlen_attention_cpu(
        q,
        k,
        v,
        call.cu_seqlens_q,
        call.cu_seqlens_kv,
        sinks,
        call.max_seqlen_q,
        call.max_seqlen_kv,
        *_options(spec),
    )
    return out


def _options(spec: AttentionSpec) -> tuple[int, int, float, float]:
    """Return a spec's fields in the order in which the operators take them, which know no dataclass."""
    return spec.left, spec.right, spec.scale, spec.softcap


def is_plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether a call is eager CPU code without a dispatch mode, transform or tensor subclass.

    Forward-mode tensors are plain, too: the kernels and functions that serve plain calls refuse them.
    """
    return (
        type(q) is type(k) is type(v) is Tensor
        and q.is_cpu
        and not torch.compiler.is_compiling()
        and not mode_counter()()
        and not transform_test()()
    )


def _refuse_forward_mode(*tensors: Tensor | None) -> None:
    """Refuse forward-mode tensors, whose tangent torch would silently set to 0 in a custom operator."""
    if torch.compiler.is_compiling():
        return
    tangent_of: Any = forward_ad.unpack_dual
    if any(x is not None and tangent_of(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "Attention on packs has no forward-mode derivative (torch.func.jvp). Use the backward pass."
        )


class _OneByOne(NamedTuple):
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
        self.offsets_q = offsets_q
        self.offsets_kv = offsets_kv
        self.spec = spec
        self._heads, self._size = width
        self._plans: dict[bool, Plan] = {}

        runs_alone = (
            dtype in (torch.float32, torch.float64)  # torch's own backward in half precision is slow
            and value_size == self._size
            and not spec.softcap
            and (self._heads == kv_heads or cpu_tiles.kernel_shares_heads())
        )
        self.one_by_one: _OneByOne | None = None
        if runs_alone and self._is_faster_one_by_one():
            self.one_by_one = _one_by_one(offsets_q, offsets_kv, spec)

    def _is_faster_one_by_one(self) -> bool:
        """Return whether one kernel call per sequence is faster than calls that several sequences share."""
        num_sequences = len(self.offsets_q) - 1
        if num_sequences <= _FEW:
            return True

        lengths = {stop - start for start, stop in pairwise(self.offsets_q)}
        differ = len(lengths) > 1  # usually one call can run sequences of equal length
        large = self.offsets_q[-1] * self._heads * self._size >= _LARGE * num_sequences
        return large and differ and torch.get_num_threads() <= self._heads

    def plan(self, *, by_keys: bool) -> Plan:
        """Return the calls of the forward or, if ``by_keys`` is set, of the backward, which splits keys."""
        if by_keys not in self._plans:
            self._plans[by_keys] = self._make_plan(by_keys)
        return self._plans[by_keys]

    def _make_plan(self, by_keys: bool) -> Plan:
        spec = self.spec
        width = self._heads * self._size
        # A call on one sequence uses one thread per head; if some would idle, group longer sequences too.
        grouped = SHORT
        if torch.get_num_threads() <= self._heads:
            grouped = min(SHORT, GROUPED_ELEMENTS // width)

        max_cells = None
        if spec.softcap:  # only then are scores stored
            max_cells = max(1, _SCORES // self._heads)

        return make_plan(
            self.offsets_q,
            self.offsets_kv,
            left=spec.left,
            right=spec.right,
            by_keys=by_keys,
            max_cells=max_cells,
            grouped=grouped,
            width=width,
        )


_cached_work = lru_cache(maxsize=32)(_Work)  # all layers of a kind run the same calls


def _one_by_one(
    offsets_q: tuple[int, ...], offsets_kv: tuple[int, ...], spec: AttentionSpec
) -> _OneByOne | None:
    """Return the sequences if each has 1 to SHORT queries and keys and needs no mask tensor, else None."""
    rows = [stop - start for start, stop in pairwise(offsets_q)]
    keys = [stop - start for start, stop in pairwise(offsets_kv)]
    if min(*rows, *keys) == 0 or max(*rows, *keys) > SHORT:
        return None

    causal = []
    for num_rows, num_keys in zip(rows, keys, strict=True):
        no_left_side = spec.left < 0 or spec.left >= num_keys - 1
        sees_all = no_left_side and (spec.right < 0 or spec.right >= num_rows - 1)
        sees_triangle = no_left_side and spec.right == 0 and num_rows == num_keys
        if not (sees_all or sees_triangle):
            return None
        causal.append(not sees_all)
    return _OneByOne(rows, keys, causal)


def _attend_one_by_one(q: Tensor, k: Tensor, v: Tensor, one_by_one: _OneByOne, scale: float) -> Tensor:
    """Attend to ``[1, H, T, D]`` with one kernel call per sequence; return contiguous ``[1, T, H, E]``."""
    if q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
        q = q.contiguous()
        k = k.contiguous()
        v = v.contiguous()

    flash, _ = cpu_tiles.flash_operators()
    if len(one_by_one.rows) == 1:
        out: Tensor = flash(q, k, v, 0.0, one_by_one.causal[0], scale=scale)[0]
        return out.transpose(1, 2)

    outs = []
    for of_one_q, of_one_k, of_one_v, causal in zip(
        q.split_with_sizes(one_by_one.rows, 2),
        k.split_with_sizes(one_by_one.keys, 2),
        v.split_with_sizes(one_by_one.keys, 2),
        one_by_one.causal,
        strict=True,
    ):
        of_one_out, _ = flash(of_one_q, of_one_k, of_one_v, 0.0, causal, scale=scale)
        outs.append(of_one_out.transpose(1, 2))
    return torch.cat(outs, 1)


def _one_by_one_forward(one_by_one: _OneByOne, q: Tensor, k: Tensor, v: Tensor, scale: float) -> OutLse:
    """Return out and lse; out equals that of ``_attend_one_by_one`` bit for bit."""
    flash, _ = cpu_tiles.flash_operators()
    sequences = zip(
        _by_sequence(q, one_by_one.rows),
        _by_sequence(k, one_by_one.keys),
        _by_sequence(v, one_by_one.keys),
        one_by_one.causal,
        strict=True,
    )
    results = [flash(*tensors, 0.0, causal, scale=scale) for *tensors, causal in sequences]

    outs, sums = zip(*results, strict=True)
    return _as_rows(outs), _as_rows(sums)


def _one_by_one_backward(
    one_by_one: _OneByOne, by_q: tuple[Tensor, ...], by_k: tuple[Tensor, ...], scale: float
) -> Gradients:
    """Return the gradients of ``_one_by_one_forward``, by one call of the kernel's backward per sequence."""
    _, flash_backward = cpu_tiles.flash_operators()
    grads, queries, outs, sums = (_by_sequence(x, one_by_one.rows) for x in by_q)
    keys, values = (_by_sequence(x, one_by_one.keys) for x in by_k)
    sequences = zip(grads, queries, keys, values, outs, sums, one_by_one.causal, strict=True)
    results = [flash_backward(*tensors, 0.0, causal, scale=scale) for *tensors, causal in sequences]

    dq, dk, dv = zip(*results, strict=True)
    return _as_rows(dq), _as_rows(dk), _as_rows(dv)


def _by_sequence(x: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
    """Split ``[T, H, ...]`` into one ``[1, H, length, ...]`` per sequence."""
    return x.transpose(0, 1).unsqueeze(0).split_with_sizes(lengths, 2)


def _as_rows(parts: tuple[Tensor, ...]) -> Tensor:
    """Undo ``_by_sequence``: join ``[1, H, length, ...]`` of all sequences to ``[T, H, ...]``, contiguous."""
    return torch.cat(parts, 2)[0].transpose(0, 1).contiguous()


class _Attention(torch.autograd.Function):
    """Attention of plain eager code, which needs no operator around it."""

    @staticmethod
    def forward(ctx: Any, work: _Work, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        out, lse = _forward(work, q, k, v)
        if sinks is not None:
            out, lse = apply_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.work = work
        return out

    @staticmethod
    @reported
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        work: _Work = ctx.work
        dsinks: Tensor | None = None

        if torch.is_grad_enabled():  # with create_graph=True; this operator refuses a second derivative
            offsets_q = torch.tensor(work.offsets_q, dtype=torch.int32)
            offsets_kv = torch.tensor(work.offsets_kv, dtype=torch.int32)
            dq, dk, dv, dsinks = _backward_op(
                grads[0], q, k, v, out, lse, offsets_q, offsets_kv, *_options(work.spec), sinks
            )
            return None, dq, dk, dv, None if sinks is None else dsinks

        if sinks is not None:
            dsinks = sinks_gradient(grads[0], out, lse, sinks)
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
    call = KernelCall(cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
    offsets_q, offsets_kv = call.checked(q.shape[0], k.shape[0])
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
    offsets_q, *_ = read_offsets(cu_seqlens_q)
    offsets_kv, *_ = read_offsets(cu_seqlens_kv)
    dq, dk, dv = backward(grad_out, Saved(q, k, v, out, lse), offsets_q, offsets_kv, spec=spec)

    dsinks = q.new_empty(0)
    if sinks is not None:
        dsinks = sinks_gradient(grad_out, out, lse, sinks)
    return dq, dk, dv, dsinks


@_backward_op.register_fake
def _backward_fake(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    sinks = rest[-1]
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_kv, sinks, _, _, *ctx.options = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv, sinks)


def _differentiate(ctx: Any, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv, sinks = ctx.saved_tensors
    dq, dk, dv, dsinks = _backward_op(
        grad_out, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv, *ctx.options, sinks
    )
    no_offsets = (None, None)
    no_options = (None,) * 6  # longest lengths, sides, scale and softcap
    return dq, dk, dv, *no_offsets, None if sinks is None else dsinks, *no_options


varlen_attention_cpu.register_autograd(_differentiate, setup_context=_setup_context)


def _second_derivative(*_: Any) -> tuple[None, ...]:
    raise NotImplementedError(
        "Attention on packs has no second derivative. Use padded rows with attn_implementation='eager'."
    )


_backward_op.register_autograd(_second_derivative)


class CpuKernel:
    """The CPU kernel as a ``RawKernel``, for partial results to be merged and for gathered keys."""

    sizes = staticmethod(any_size)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, spec: AttentionSpec) -> OutLse:
        """Return attention output and log-sum-exp of packed sequences; lse is fp64 for fp64 inputs."""
        return forward(q, k, v, call.cu_seqlens_q.tolist(), call.cu_seqlens_kv.tolist(), spec=spec)

    def backward(self, grad: Tensor, saved: Saved, call: KernelCall, spec: AttentionSpec) -> Gradients:
        """Return dq, dk and dv from the output's gradient and the saved tensors of the forward."""
        return backward(grad, saved, call.cu_seqlens_q.tolist(), call.cu_seqlens_kv.tolist(), spec=spec)


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
    work = _work_of(q_THD, k_THD, v_THE, offsets_q, offsets_kv, spec)
    out, lse = _forward(work, q_THD, k_THD, v_THE)
    if sinks is not None:
        out, lse = apply_sinks(out, lse, sinks)
    return out, lse


def _work_of(
    q: Tensor, k: Tensor, v: Tensor, offsets_q: Sequence[int], offsets_kv: Sequence[int], spec: AttentionSpec
) -> _Work:
    """Return the kernel calls for tensors of these shapes; calls with equal offsets share them."""
    return _cached_work(
        tuple(offsets_q), tuple(offsets_kv), spec, q.shape[1:], k.shape[1], v.shape[2], q.dtype
    )


def _forward(work: _Work, q: Tensor, k: Tensor, v: Tensor) -> OutLse:
    q = _dense_rows(q)
    k = _dense_rows(k)
    v = _dense_rows(v)
    spec = work.spec
    if work.one_by_one is not None:
        return _one_by_one_forward(work.one_by_one, q, k, v, spec.scale)

    plan = work.plan(by_keys=False)
    if plan.at_once is not None and q.shape[2] == v.shape[2] and q.dtype != torch.float16:
        (tiles,) = plan.at_once.calls  # the call runs on views, so no row is copied
        out, lse = cpu_tiles.flash_forward(
            tiles.q.view(q),
            tiles.k.view(k),
            tiles.k.view(v),
            causal=tiles.is_top_left(spec.left, spec.right),
            mask=None,
            scale=spec.scale,
        )
        return out.flatten(0, 1).contiguous(), lse.flatten(0, 1).contiguous()

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
    spec = work.spec
    if work.one_by_one is not None:
        return _one_by_one_backward(work.one_by_one, by_q, by_k, spec.scale)

    plan = work.plan(by_keys=True)
    if plan.at_once is not None and q.shape[2] == v.shape[2] and q.dtype == lse.dtype:
        (tiles,) = plan.at_once.calls
        grad, q, out, lse = (tiles.q.view(x) for x in by_q)
        k, v = (tiles.k.view(x) for x in by_k)
        causal = tiles.is_top_left(spec.left, spec.right)
        grads = cpu_tiles.flash_backward(grad, q, k, v, out, lse, causal=causal, mask=None, scale=spec.scale)
        dq, dk, dv = (x.flatten(0, 1).contiguous() for x in grads)
        return dq, dk, dv

    dq = q.new_empty(q.shape)
    dk = k.new_empty(k.shape)
    dv = v.new_empty(v.shape)
    for start, stop in plan.blank_q:
        dq[start:stop] = 0.0
    for start, stop in plan.blank_k:
        dk[start:stop] = 0.0
        dv[start:stop] = 0.0

    kernel = _Kernel(spec, Masks(spec, lse.dtype), q.shape[2], v.shape[2])
    for piece in plan.pieces:
        for heads, kv_heads in _head_slices(piece.q.total, q, k, at_least=torch.get_num_threads()):
            some_by_q = [_heads(x, heads) for x in by_q]
            some_by_k = [_heads(x, kv_heads) for x in by_k]
            some_grads = (_heads(dq, heads), _heads(dk, kv_heads), _heads(dv, kv_heads))
            _piece_backward(piece, kernel, some_by_q, some_by_k, some_grads)
    return dq, dk, dv


def _piece_forward(
    piece: Piece, kernel: _Kernel, inputs: tuple[Tensor, ...], results: tuple[Tensor, Tensor]
) -> None:
    """Run the calls of a piece on q, k and v, and write out and lse to the piece's rows of ``results``."""
    whole_q, whole_k, whole_v = inputs
    whole_out, whole_lse = results
    q = piece.q.take(whole_q)
    k = kernel.widen(piece.k.take(whole_k))
    v = kernel.widen(piece.k.take(whole_v))

    for tiles in piece.calls:
        for heads, kv_heads in _head_slices(tiles.q.count * tiles.rows, q, k, at_least=1):
            out, lse = kernel.forward(
                tiles.q.view(_heads(q, heads)),
                tiles.k.view(_heads(k, kv_heads)),
                tiles.k.view(_heads(v, kv_heads)),
                tiles,
            )
            piece.q.put_tiles(_heads(whole_out, heads), out, tiles.q)
            piece.q.put_tiles(_heads(whole_lse, heads), lse, tiles.q)
            del out, lse  # free these results before the next call allocates its own


def _piece_backward(
    piece: Piece, kernel: _Kernel, by_q: list[Tensor], by_k: list[Tensor], grads: tuple[Tensor, ...]
) -> None:
    """Run the calls of a piece: ``by_q`` is grad, q, out and lse, ``by_k`` k and v; write to ``grads``."""
    wide = by_q[3].dtype
    by_q = [piece.q.take(x).to(wide) for x in by_q]
    by_k = [piece.k.take(x).to(wide) for x in by_k]
    if piece.q.lengths is not None:  # padded queries get weights of 0 and gradients of 0
        grad, _, _, lse = by_q
        piece.q.fill_padding(grad, 0.0)
        piece.q.fill_padding(lse, torch.inf)

    if piece.once:
        _backward_once(piece, kernel, by_q, by_k, grads)
    else:
        _backward_summed(piece, kernel, by_q, by_k, grads, wide)


def _backward_summed(
    piece: Piece,
    kernel: _Kernel,
    by_q: list[Tensor],
    by_k: list[Tensor],
    grads: tuple[Tensor, ...],
    wide: torch.dtype,
) -> None:
    """Run the backward of a piece whose calls share queries and keys, so that all gradients are summed."""
    dq, dk, dv = grads
    sum_q = _sum_of(piece.q, dq, wide)
    sum_k = _sum_of(piece.k, dk, wide)
    sum_v = _sum_of(piece.k, dv, wide)

    for tiles in piece.calls:
        tiles_by_q = [tiles.q.view(x) for x in by_q]
        tiles_by_k = [tiles.k.view(x) for x in by_k]
        part_q, part_k, part_v = kernel.backward(tiles_by_q, tiles_by_k, tiles)
        tiles.q.add(sum_q, part_q)
        tiles.k.add(sum_k, part_k)
        tiles.k.add(sum_v, part_v)
        del part_q, part_k, part_v  # free these results before the next call allocates its own

    if not _sums_in_place(piece.q, dq, wide):
        piece.q.put(dq, sum_q)
    if not _sums_in_place(piece.k, dk, wide):
        piece.k.put(dk, sum_k)
    if not _sums_in_place(piece.k, dv, wide):
        piece.k.put(dv, sum_v)


def _sums_in_place(rows: Rows, grad: Tensor, wide: torch.dtype) -> bool:
    """Return whether a gradient can be summed in the tensor that is returned, without a copy."""
    return rows.span is not None and grad.dtype == wide


def _sum_of(rows: Rows, grad: Tensor, wide: torch.dtype) -> Tensor:
    """Return zeros ``[N, ...]`` to sum a piece's gradient in: a view of the gradient if possible."""
    if _sums_in_place(rows, grad, wide):
        return rows.take(grad).zero_()
    return grad.new_zeros(rows.total, *grad.shape[1:], dtype=wide)


def _backward_once(
    piece: Piece, kernel: _Kernel, by_q: list[Tensor], by_k: list[Tensor], grads: tuple[Tensor, ...]
) -> None:
    """Run the backward of a piece that has every key in exactly one tile, so that only dq is summed."""
    dq, dk, dv = grads
    sum_q: Tensor | None = None
    for tiles in piece.calls:
        tiles_by_q = [tiles.q.view(x) for x in by_q]
        tiles_by_k = [tiles.k.view(x) for x in by_k]
        part_q, part_k, part_v = kernel.backward(tiles_by_q, tiles_by_k, tiles)
        if sum_q is None:  # the first call contains every query
            sum_q = part_q.flatten(0, 1)
        else:
            tiles.q.add(sum_q, part_q)
        piece.k.put_tiles(dk, part_k, tiles.k)
        piece.k.put_tiles(dv, part_v, tiles.k)
        del part_q, part_k, part_v  # free these results before the next call allocates its own

    assert sum_q is not None
    piece.q.put(dq, sum_q)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Runs tiles with the flash kernel or, if there is a softcap, with matrix products."""

    spec: AttentionSpec
    masks: Masks
    head_size: int
    value_size: int

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> OutLse:
        """Return out and lse of one call, for q, k and v ``[B, R, H, ...]``."""
        spec = self.spec
        if spec.softcap:
            mask = self.masks.of(tiles)
            return cpu_tiles.product_forward(q, k, v, mask=mask, scale=spec.scale, softcap=spec.softcap)

        causal = tiles.is_top_left(spec.left, spec.right)
        mask = None if causal else self.masks.of(tiles)
        q = self.widen(q)
        k = self.widen(k)
        v = self.widen(v)
        out, lse = cpu_tiles.flash_forward(q, k, v, causal=causal, mask=mask, scale=spec.scale)
        return out[..., : self.value_size], lse

    def backward(self, by_q: list[Tensor], by_k: list[Tensor], tiles: Tiles) -> Gradients:
        """Return dq, dk and dv of one call; ``by_q`` is grad, q, out and lse, and ``by_k`` is k and v."""
        grad, q, out, lse = by_q
        k, v = by_k
        spec = self.spec
        if spec.softcap:
            mask = self.masks.of(tiles)
            return cpu_tiles.product_backward(
                grad, q, k, v, out, lse, mask=mask, scale=spec.scale, softcap=spec.softcap
            )

        causal = tiles.is_top_left(spec.left, spec.right)
        mask = None if causal else self.masks.of(tiles)
        grad, q, k, v, out = (self.widen(x) for x in (grad, q, k, v, out))
        dq, dk, dv = cpu_tiles.flash_backward(
            grad, q, k, v, out, lse, causal=causal, mask=mask, scale=spec.scale
        )
        return dq[..., : self.head_size], dk[..., : self.head_size], dv[..., : self.value_size]

    def widen(self, x: Tensor) -> Tensor:
        """Append zeros to the heads; this changes neither the scores nor the columns that are kept."""
        missing = max(self.head_size, self.value_size) - x.shape[-1]
        if missing == 0 or self.spec.softcap:
            return x
        return pad(x, (0, missing))


def _dense_rows(x: Tensor) -> Tensor:
    """Return a contiguous copy if the last stride is not 1; the kernels accept any other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _heads(x: Tensor, heads: slice | None) -> Tensor:
    """Return some heads of ``[T, H, ...]``; None means all."""
    return x if heads is None else x[:, heads]


def _head_slices(
    num_rows: int, q: Tensor, k: Tensor, *, at_least: int
) -> Iterator[tuple[slice | None, slice | None]]:
    """Yield slices of q's and of k's heads, so that each call needs little memory; None is all heads."""
    kv_heads = k.shape[1]
    group_size = q.shape[1] // kv_heads  # the query heads of a key-value head
    group_elements = num_rows * group_size * q.shape[2]
    step = max(1, _CALL_ELEMENTS // group_elements, -(-at_least // group_size))
    if step >= kv_heads:
        yield None, None
        return
    for start in range(0, kv_heads, step):
        stop = min(start + step, kv_heads)
        yield slice(start * group_size, stop * group_size), slice(start, stop)
