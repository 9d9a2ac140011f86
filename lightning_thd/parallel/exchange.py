"""A tensor of each rank -> the sum, the gathered rows or the exchanged parts, differentiable.

All ranks of ``group`` call the functions in the same order. Functions of rows and heads give the gradients of
the sum of all ranks' losses, and count what they receive in ``traffic``; the others are for ranks that all
compute the same loss.
Legend: P ranks of the group, N rows of one rank, H heads, h heads on one rank, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from lightning_thd.parallel.context.traffic import Traffic

# torch 2.13 renamed both functions and kept their arguments.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Map = Callable[[Tensor], Tensor]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor as a plain tensor that autograd follows."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Both(torch.autograd.Function):
    """Applies one map to a tensor and another map to its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Map, back: Map) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None


def mapped(x: Tensor, there: Map, back: Map) -> Tensor:
    """Return ``there(x)``; ``back`` maps the gradient of the result to the gradient of ``x``."""
    out: Tensor = _Both.apply(x, there, back)  # type: ignore[no-untyped-call]
    return out


def stacked(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather all ranks' ``[N, ...]`` as ``[P * N, ...]``, without a gradient."""
    out = rows.new_empty((rows.shape[0] * group.size(), *rows.shape[1:]))
    _gather(out, rows.contiguous(), group=group)
    return out


def _gathered(rows: Tensor, group: dist.ProcessGroup, traffic: Traffic | None) -> Tensor:
    """Gather as ``stacked`` does, and count the bytes of other ranks' rows."""
    out = stacked(rows, group)
    if traffic is not None:
        traffic.count("bytes", out[rows.shape[0] :].nbytes)
    return out


def _scattered(rows: Tensor, group: dist.ProcessGroup, traffic: Traffic | None) -> Tensor:
    """Return this rank's ``[N, ...]`` of the sum over ranks of ``[P * N, ...]``; count the bytes."""
    out = rows.new_empty((rows.shape[0] // group.size(), *rows.shape[1:]))
    _reduce_scatter(out, rows.contiguous(), group=group)
    if traffic is not None:
        traffic.count("bytes", rows[out.shape[0] :].nbytes)
    return out


def _exchanged(
    rows: Tensor,
    group: dist.ProcessGroup,
    traffic: Traffic | None,
    sent: list[int] | None = None,
    received: list[int] | None = None,
) -> Tensor:
    """Return ``received[i]`` rows of rank i and send it ``sent[i]``; without lists, equally many each."""
    if received is None:
        num_rows = rows.shape[0]
        num_kept = num_rows // group.size()  # rows that this rank sends itself
    else:
        num_rows = sum(received)
        num_kept = received[group.rank()]
    out = rows.new_empty((num_rows, *rows.shape[1:]))
    dist.all_to_all_single(
        out, rows.contiguous(), output_split_sizes=received, input_split_sizes=sent, group=group
    )
    if traffic is not None:
        traffic.count("bytes", out[num_kept:].nbytes)  # as many rows as came from other ranks
    return out


def reduced(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks, without a gradient."""
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


class _SumGradients(torch.autograd.Function):
    """Returns tensors unchanged, and sums their gradients over ranks."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Copy the gradients, because autograd may pass the same tensor to other functions.
        summed = [grad.clone(memory_format=torch.contiguous_format) for grad in grads]
        for grad in summed:
            dist.all_reduce(grad, group=ctx.group)
        return None, *summed


class _KeepPath(torch.autograd.Function):
    """Returns a tensor unchanged, and gives others a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        ctx.shapes = [x.shape for x in inputs]
        ctx.dtypes = [x.dtype for x in inputs]
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        grad = grads[0]
        zeros = [
            grad.new_zeros(shape, dtype=dtype) for shape, dtype in zip(ctx.shapes, ctx.dtypes, strict=True)
        ]
        return grad, *zeros


def _gather_dim(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    return stacked(x.movedim(dim, 0), group).movedim(0, dim).contiguous()


def _own_part(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    return x.chunk(group.size(), dim=dim)[group.rank()].contiguous()


def gather_same(x: Tensor, group: dist.ProcessGroup, *, dim: int) -> Tensor:
    """Gather the ranks' parts along ``dim``; cut the gradient, which is the same on all ranks."""
    return mapped(x, partial(_gather_dim, group=group, dim=dim), partial(_own_part, group=group, dim=dim))


def keep_own(x: Tensor, group: dist.ProcessGroup, *, dim: int) -> Tensor:
    """Keep this rank's part along ``dim`` of a tensor that is the same on all ranks; gather the gradient."""
    return mapped(x, partial(_own_part, group=group, dim=dim), partial(_gather_dim, group=group, dim=dim))


def all_gather_rows(rows: Tensor, group: dist.ProcessGroup, traffic: Traffic | None = None) -> Tensor:
    """Gather all ranks' rows, N of each rank, as ``[P * N, ...]``; reduce-scatter the gradient."""
    options: dict[str, Any] = {"group": group, "traffic": traffic}
    return mapped(rows, partial(_gathered, **options), partial(_scattered, **options))


def exchange_rows(
    rows: Tensor,
    sent: list[int],
    received: list[int],
    group: dist.ProcessGroup,
    traffic: Traffic | None = None,
) -> Tensor:
    """Send ``sent[i]`` rows to rank i, first rank 0's, and receive ``received[i]``; send gradients back."""
    options: dict[str, Any] = {"group": group, "traffic": traffic}
    there = partial(_exchanged, sent=sent, received=received, **options)
    return mapped(rows, there, partial(_exchanged, sent=received, received=sent, **options))


def sum_gradients(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return ``x`` unchanged, and sum its gradient over ranks that use it differently."""
    return sum_all_gradients((x,), group)[0]


def sum_all_gradients(tensors: tuple[Tensor, ...], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Apply ``sum_gradients`` to several tensors, whose gradients all ranks sum in the same order."""
    out: tuple[Tensor, ...] = _SumGradients.apply(group, *tensors)  # type: ignore[no-untyped-call]
    return out


def keep_path(out: Tensor, *inputs: Tensor) -> Tensor:
    """Return ``out`` and give ``inputs`` a zero gradient, so that every rank runs their backward pass."""
    kept: Tensor = _KeepPath.apply(out, *inputs)  # type: ignore[no-untyped-call]
    return kept


def sum_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce partial sums; the gradient is unchanged, because all ranks do the same with the total."""
    return mapped(x, partial(reduced, group=group), lambda gradient: gradient)


def rows_to_heads(
    x_NHD: Tensor,
    group: dist.ProcessGroup,
    heads: Tensor | None = None,
    *,
    traffic: Traffic | None = None,
) -> Tensor:
    """Send each rank h heads of this rank's rows; return this rank's h heads of all rows, ``[P * N, h, D]``.

    ``heads``, int64 ``[P * h]``, lists the heads that are sent, rank 0's first; None sends all in order.
    """
    ranks = group.size()
    wanted = x_NHD if heads is None else x_NHD.index_select(1, heads)
    sent = wanted.unflatten(1, (ranks, -1)).transpose(0, 1)  # type: ignore[no-untyped-call]
    trade = partial(_exchanged, group=group, traffic=traffic)
    return mapped(sent, trade, trade).flatten(0, 1)


def heads_to_rows(x_PNhD: Tensor, group: dist.ProcessGroup, *, traffic: Traffic | None = None) -> Tensor:
    """Undo ``rows_to_heads``: ``[P * N, h, D]`` -> ``[N, P * h, D]``."""
    sent = x_PNhD.unflatten(0, (group.size(), -1))  # type: ignore[no-untyped-call]
    trade = partial(_exchanged, group=group, traffic=traffic)
    return mapped(sent, trade, trade).transpose(0, 1).flatten(1, 2)
