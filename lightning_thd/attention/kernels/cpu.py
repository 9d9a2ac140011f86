"""q, k, v in THD and host offsets -> out and log-sum-exp on the CPU, in memory linear in T.

Legend: T slots, S sequences, H query heads, G key-value heads, D head size, E value head size, B tiles in a
    call.
Runs on torch's own flash kernel for CPUs, which is top-left causal, wants E == D, and kills the process on an
empty sequence; the calls of ``plan`` never ask it for anything else. Softcap runs on matrix products
(``tiled``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_thd.attention.kernels import flash_cpu, tiled
from lightning_thd.attention.kernels.kernel import Offsets, Saved
from lightning_thd.attention.kernels.masks import Masks
from lightning_thd.attention.kernels.plan import GROUPED_ELEMENTS, SHORT, Piece, Plan, Tiles, make_plan
from lightning_thd.attention.kernels.sinks import apply_sinks
from lightning_thd.attention.spec import AttentionSpec

# Scores one softcap call may hold: 8 MiB in fp32.
_SCORES = 1 << 21
# Elements a call may return per tensor before its heads are taken a few at a time: 8 MiB in fp32.
_CALL_ELEMENTS = 1 << 21


def forward(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THE: Tensor,
    cu_q: Sequence[int],
    cu_kv: Sequence[int],
    *,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend within every sequence.

    Args:
        q_THD: ``[Tq, H, D]`` float.
        k_THD: ``[Tkv, G, D]``.
        v_THE: ``[Tkv, G, E]``.
        cu_q: S + 1 offsets, the last Tq.
        cu_kv: S + 1 offsets, the last Tkv.
        spec: window, scale and softcap.
        sinks: ``[H]`` logits of a key without a value that every query sees, or None.

    Returns:
        out ``[Tq, H, E]`` in the dtype of q and lse ``[Tq, H]`` in fp32 (fp64 for fp64), the sink included;
        a query that sees nothing has out 0 and lse -inf.
    """
    plan = _plan(cu_q, cu_kv, q_THD, spec, by_keys=False)
    q, k, v = (_dense_rows(x) for x in (q_THD, k_THD, v_THE))
    if plan.at_once is not None and q.shape[2] == v.shape[2] and q.dtype != torch.float16:
        out, lse = _forward_at_once(plan.at_once, q, k, v, spec)
        return (out, lse) if sinks is None else apply_sinks(out, lse, sinks)
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    for start, stop in plan.blank_q:
        out[start:stop] = 0.0
        lse[start:stop] = -torch.inf
    kernel = _Kernel(spec, Masks(spec, lse.dtype), q.shape[2], v.shape[2])
    for piece in plan.pieces:
        _piece_forward(piece, kernel, (q, k, v), (out, lse))
    return (out, lse) if sinks is None else apply_sinks(out, lse, sinks)


def backward(
    grad_out: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THE: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Sequence[int],
    cu_kv: Sequence[int],
    *,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``forward`` to q, k and v, contiguous and in their dtypes.

    out and lse may hold more than these keys gave (a sink, other ranks' keys): weights are recomputed from
    lse.
    """
    plan = _plan(cu_q, cu_kv, q_THD, spec, by_keys=True)
    by_q = tuple(_dense_rows(x) for x in (grad_out, q_THD, out, lse))
    by_k = tuple(_dense_rows(x) for x in (k_THD, v_THE))
    if plan.at_once is not None and q_THD.shape[2] == v_THE.shape[2] and q_THD.dtype == lse.dtype:
        return _backward_at_once(plan.at_once, by_q, by_k, spec)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q_THD, *by_k))
    for grad, blanks in ((dq, plan.blank_q), (dk, plan.blank_k), (dv, plan.blank_k)):
        for start, stop in blanks:
            grad[start:stop] = 0.0
    kernel = _Kernel(spec, Masks(spec, lse.dtype), q_THD.shape[2], v_THE.shape[2])
    for piece in plan.pieces:
        for heads, kv_heads in _head_slices(piece.q.total, q_THD, k_THD, at_least=torch.get_num_threads()):
            _piece_backward(
                piece,
                kernel,
                [_heads(x, heads) for x in by_q],
                [_heads(x, kv_heads) for x in by_k],
                (_heads(dq, heads), _heads(dk, kv_heads), _heads(dv, kv_heads)),
            )
    return dq, dk, dv


def _forward_at_once(
    piece: Piece, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Attend in sequences of equal length by one kernel call on views, without copying rows."""
    (call,) = piece.calls
    causal = call.is_top_left(spec.left, spec.right)
    given = (call.q.view(q), call.k.view(k), call.k.view(v))
    out, lse = flash_cpu.forward(*given, causal=causal, mask=None, scale=spec.scale)
    return out.flatten(0, 1).contiguous(), lse.flatten(0, 1).contiguous()


def _backward_at_once(
    piece: Piece, by_q: tuple[Tensor, ...], by_k: tuple[Tensor, ...], spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of ``_forward_at_once`` by one kernel call on views.

    Half precision goes the other way, a few sequences at a time: widened whole, it would leave the cache.
    So does the forward in fp16, which is widened too.
    """
    (call,) = piece.calls
    grad, q, out, lse = (call.q.view(x) for x in by_q)
    k, v = (call.k.view(x) for x in by_k)
    causal = call.is_top_left(spec.left, spec.right)
    grads = flash_cpu.backward(grad, q, k, v, out, lse, causal=causal, mask=None, scale=spec.scale)
    dq, dk, dv = (x.flatten(0, 1).contiguous() for x in grads)
    return dq, dk, dv


class CpuKernel:
    """The CPU kernel as a ``RawKernel``, for results that are merged with those on other keys."""

    def sizes(self, head_size: int, value_size: int) -> tuple[int, int] | None:
        """Return both head sizes unchanged: the CPU kernel runs any."""
        return head_size, value_size

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, at: Offsets, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Return attention output and log-sum-exp of packed sequences, the latter in fp64 for fp64 inputs."""
        return forward(q, k, v, at.cu_q.tolist(), at.cu_kv.tolist(), spec=spec)

    def backward(
        self, grad: Tensor, saved: Saved, at: Offsets, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv from the output's gradient and what the forward pass saved."""
        return backward(grad, *saved, at.cu_q.tolist(), at.cu_kv.tolist(), spec=spec)


def _piece_forward(
    piece: Piece, kernel: _Kernel, inputs: tuple[Tensor, ...], results: tuple[Tensor, Tensor]
) -> None:
    """Run the forward of a piece and write its rows of out and lse."""
    q, k, v = piece.q.take(inputs[0]), *(kernel.widen(piece.k.take(x)) for x in inputs[1:])
    for call in piece.calls:
        for heads, kv_heads in _head_slices(call.q.count * call.rows, q, k, at_least=1):
            k_part, v_part = (call.k.view(_heads(x, kv_heads)) for x in (k, v))
            parts = kernel.forward(call.q.view(_heads(q, heads)), k_part, v_part, call)
            for x, part in zip(results, parts, strict=True):
                piece.q.put_tiles(_heads(x, heads), part, call.q)
            del parts, part  # before the next call makes its own: up to 8 MiB each


def _piece_backward(
    piece: Piece, kernel: _Kernel, by_q: list[Tensor], by_k: list[Tensor], grads: tuple[Tensor, ...]
) -> None:
    """Run the backward of a piece and write its rows of dq, dk and dv.

    Half precision is widened once for all tiles, and rows that lie in several are added up in fp32.
    """
    wide = by_q[3].dtype
    by_q, by_k = [piece.q.take(x).to(wide) for x in by_q], [piece.k.take(x).to(wide) for x in by_k]
    if piece.q.lengths is not None:  # padded queries weigh nothing and pass nothing on
        piece.q.fill_padding(by_q[0], 0.0)
        piece.q.fill_padding(by_q[3], torch.inf)
    if piece.once:
        _backward_once(piece, kernel, by_q, by_k, grads)
        return
    at = (piece.q, piece.k, piece.k)
    own = [rows.span is not None and x.dtype == wide for x, rows in zip(grads, at, strict=True)]
    sums = [
        rows.take(x).zero_() if mine else x.new_zeros(rows.total, *x.shape[1:], dtype=wide)
        for x, rows, mine in zip(grads, at, own, strict=True)
    ]
    for call in piece.calls:
        parts = kernel.backward([call.q.view(x) for x in by_q], [call.k.view(x) for x in by_k], call)
        for total, part, tiles in zip(sums, parts, (call.q, call.k, call.k), strict=True):
            tiles.add(total, part)
        del parts, part  # before the next call makes its own: up to 8 MiB each
    for grad, total, rows, mine in zip(grads, sums, at, own, strict=True):
        if not mine:
            rows.put(grad, total)


def _backward_once(
    piece: Piece, kernel: _Kernel, by_q: list[Tensor], by_k: list[Tensor], grads: tuple[Tensor, ...]
) -> None:
    """Run the backward of a piece where every key is in one tile, so that only dq adds up."""
    dq = None
    for call in piece.calls:
        parts = kernel.backward([call.q.view(x) for x in by_q], [call.k.view(x) for x in by_k], call)
        if dq is None:  # the first call has every query
            dq = parts[0].flatten(0, 1)
        else:
            call.q.add(dq, parts[0])
        for grad, part in zip(grads[1:], parts[1:], strict=True):
            piece.k.put_tiles(grad, part, call.k)
        del parts, part  # before the next call makes its own: up to 8 MiB each
    assert dq is not None
    piece.q.put(grads[0], dq)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Runs a tile's forward or backward by the flash kernel or, with a softcap, by matrix products."""

    spec: AttentionSpec
    masks: Masks
    head_size: int
    value_size: int

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Tiles) -> tuple[Tensor, Tensor]:
        spec = self.spec
        if spec.softcap:
            return tiled.forward(q, k, v, mask=self.masks.of(call), scale=spec.scale, softcap=spec.softcap)
        causal = call.is_top_left(spec.left, spec.right)
        mask = None if causal else self.masks.of(call)
        q, k, v = (self.widen(x) for x in (q, k, v))
        out, lse = flash_cpu.forward(q, k, v, causal=causal, mask=mask, scale=spec.scale)
        return out[..., : self.value_size], lse

    def backward(self, by_q: list[Tensor], by_k: list[Tensor], call: Tiles) -> tuple[Tensor, Tensor, Tensor]:
        (grad, q, out, lse), (k, v), spec = by_q, by_k, self.spec
        if spec.softcap:
            mask = self.masks.of(call)
            return tiled.backward(grad, q, k, v, out, lse, mask=mask, scale=spec.scale, softcap=spec.softcap)
        causal = call.is_top_left(spec.left, spec.right)
        mask = None if causal else self.masks.of(call)
        grad, q, k, v, out = (self.widen(x) for x in (grad, q, k, v, out))
        dq, dk, dv = flash_cpu.backward(grad, q, k, v, out, lse, causal=causal, mask=mask, scale=spec.scale)
        return dq[..., : self.head_size], dk[..., : self.head_size], dv[..., : self.value_size]

    def widen(self, x: Tensor) -> Tensor:
        """Append zeros to the heads: they change neither scores nor the columns that are kept."""
        missing = max(self.head_size, self.value_size) - x.shape[-1]
        return x if missing == 0 or self.spec.softcap else pad(x, (0, missing))


def _plan(
    cu_q: Sequence[int], cu_kv: Sequence[int], q: Tensor, spec: AttentionSpec, *, by_keys: bool
) -> Plan:
    num_heads = q.shape[1]
    # a call of one sequence feeds as many threads as there are heads
    alone = torch.get_num_threads() <= num_heads
    return make_plan(
        tuple(cu_q),
        tuple(cu_kv),
        left=spec.left,
        right=spec.right,
        by_keys=by_keys,
        max_cells=max(1, _SCORES // num_heads) if spec.softcap else None,
        grouped=min(SHORT, GROUPED_ELEMENTS // (num_heads * q.shape[2])) if alone else SHORT,
        width=num_heads * q.shape[2],
    )


def _dense_rows(x: Tensor) -> Tensor:
    """Return a copy where the last stride is not 1, which the kernels need; other strides may be anything."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _heads(x: Tensor, heads: slice | None) -> Tensor:
    return x if heads is None else x[:, heads]


def _head_slices(
    rows_: int, q: Tensor, k: Tensor, *, at_least: int
) -> Iterator[tuple[slice | None, slice | None]]:
    """Yield slices of the heads of q and k, so that results for some rows take little memory; None is all."""
    kv_heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    elements = rows_ * groups * q.shape[2]  # of one key-value head's queries
    step = max(1, _CALL_ELEMENTS // elements, -(-at_least // groups))
    if step >= kv_heads:
        yield None, None
        return
    for start in range(0, kv_heads, step):
        stop = min(start + step, kv_heads)
        yield slice(start * groups, stop * groups), slice(start, stop)
