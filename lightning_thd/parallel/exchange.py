"""Tensors of one rank -> those its queries, heads or layers need of other ranks, differentiably.

Every function here is a collective: all ranks of ``group`` call it, in the same order. Gradients are those
of the sum of all ranks' losses.

Legend: P ranks of the group, N rows of one rank, H heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed both; the older ones have the same arguments.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _AllGatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = rows.new_empty((rows.shape[0] * group.size(), *rows.shape[1:]))
        _gather(out, rows.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        out = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        _reduce_scatter(out, grad.contiguous(), group=ctx.group)
        return out, None


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, rows.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        out = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, grad.contiguous(), group=ctx.group)
        return out, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(
        out, rows.contiguous(), output_split_sizes=received, input_split_sizes=sent, group=group
    )
    return out


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Copies: autograd may hand the same gradient to others.
        summed = [grad.clone(memory_format=torch.contiguous_format) for grad in grads]
        for grad in summed:
            dist.all_reduce(grad, group=ctx.group)
        return None, *summed


class _KeepPath(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        ctx.shapes = [x.shape for x in inputs]
        ctx.dtypes = [x.dtype for x in inputs]
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        zeros = [grads[0].new_zeros(s, dtype=d) for s, d in zip(ctx.shapes, ctx.dtypes, strict=True)]
        return grads[0], *zeros


class _SumRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _ReduceScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = rows.new_empty((rows.shape[0] // group.size(), *rows.shape[1:]))
        _reduce_scatter(out, rows.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        out = grad.new_empty((grad.shape[0] * ctx.group.size(), *grad.shape[1:]))
        _gather(out, grad.contiguous(), group=ctx.group)
        return out, None


class _JoinColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty((group.size(), *x.shape))
        _gather(out.view(-1), x.contiguous().view(-1), group=group)
        return out.movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].chunk(ctx.group.size(), dim=-1)[ctx.group.rank()].contiguous(), None


class _GatherSame(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _gather_dim(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _own_part(grads[0], ctx.group, ctx.dim), None, None


class _KeepOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _own_part(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _gather_dim(grads[0], ctx.group, ctx.dim), None, None


def _gather_dim(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    rows = x.movedim(dim, 0).contiguous()
    out = rows.new_empty((rows.shape[0] * group.size(), *rows.shape[1:]))
    _gather(out, rows, group=group)
    return out.movedim(0, dim)


def _own_part(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    return x.chunk(group.size(), dim=dim)[group.rank()].contiguous()


def gather_same(x: Tensor, group: dist.ProcessGroup, *, dim: int) -> Tensor:
    """Gather the ranks' parts along ``dim`` for work that all ranks do alike; backward keeps the own part.

    Each rank's gradient is its own part of theirs, which is the same everywhere.
    """
    out: Tensor = _GatherSame.apply(x, group, dim)  # type: ignore[no-untyped-call]
    return out


def keep_own(x: Tensor, group: dist.ProcessGroup, *, dim: int) -> Tensor:
    """Keep this rank's part along ``dim`` of a tensor that all ranks have; the gradient is gathered."""
    out: Tensor = _KeepOwn.apply(x, group, dim)  # type: ignore[no-untyped-call]
    return out


def all_gather_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather all ranks' rows end to end; the gradient is reduce-scattered.

    Args:
        rows: ``[N, ...]``, the same shape on every rank.
        group: the ranks.

    Returns:
        ``[P * N, ...]``. One all-gather of ``(P - 1) * N`` rows received by every rank, and the same back.
    """
    out: Tensor = _AllGatherRows.apply(rows, group)  # type: ignore[no-untyped-call]
    return out


def exchange_rows(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send every rank its own number of rows; gradients travel back the same way.

    Args:
        rows: ``[sum(sent), ...]``, those for rank 0 first.
        sent: rows for each rank, known on the host.
        received: rows from each rank.
        group: the ranks.

    Returns:
        ``[sum(received), ...]``, those of rank 0 first.
    """
    out: Tensor = _ExchangeRows.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return out


def reduce_scatter_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum all ranks' ``[P * N, ...]`` and keep this rank's ``[N, ...]``; the gradient is gathered."""
    out: Tensor = _ReduceScatterRows.apply(rows, group)  # type: ignore[no-untyped-call]
    return out


def sum_gradients(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return ``x`` unchanged, and sum its gradient over ranks that use it differently."""
    return sum_all_gradients((x,), group)[0]


def sum_all_gradients(tensors: tuple[Tensor, ...], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Apply ``sum_gradients`` to several tensors at one point of the backward pass, in one order."""
    out: tuple[Tensor, ...] = _SumGradients.apply(group, *tensors)  # type: ignore[no-untyped-call]
    return out


def keep_path(out: Tensor, *inputs: Tensor) -> Tensor:
    """Tie ``inputs`` to ``out`` with a zero gradient, so that their collectives run backward on every rank.

    The collectives of the backward pass that hang on ``inputs`` then run on every rank or on none.
    """
    kept: Tensor = _KeepPath.apply(out, *inputs)  # type: ignore[no-untyped-call]
    return kept


def sum_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce partial sums whose total all ranks use in the same way; the gradient passes unchanged."""
    out: Tensor = _SumRanks.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def join_columns(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the ranks' last dimensions side by side, ``[..., C]`` -> ``[..., P * C]``.

    All ranks go on with the same, so a rank's gradient is its own columns of theirs.
    """
    out: Tensor = _JoinColumns.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def rows_to_heads(x_NHD: Tensor, group: dist.ProcessGroup, heads: Tensor | None = None) -> Tensor:
    """Exchange all heads of this rank's rows for this rank's heads of all rows (Ulysses).

    Args:
        x_NHD: ``[N, H, D]``.
        group: the ranks.
        heads: int64 ``[P * h]``, the heads that every rank wants, h each; one may be wanted by several.
            None shares H out evenly.

    Returns:
        ``[P * N, h, D]``, the ranks' rows end to end.
    """
    ranks = group.size()
    wanted = x_NHD if heads is None else x_NHD.index_select(1, heads)
    sent = wanted.unflatten(1, (ranks, -1)).transpose(0, 1)  # type: ignore[no-untyped-call]
    out: Tensor = _AllToAllRows.apply(sent, group)  # type: ignore[no-untyped-call]
    return out.flatten(0, 1)


def heads_to_rows(x_PNhD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Undo ``rows_to_heads``: ``[P * N, h, D]`` -> ``[N, P * h, D]``."""
    sent = x_PNhD.unflatten(0, (group.size(), -1))  # type: ignore[no-untyped-call]
    out: Tensor = _AllToAllRows.apply(sent, group)  # type: ignore[no-untyped-call]
    return out.transpose(0, 1).flatten(1, 2)
