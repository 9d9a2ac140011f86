"""Gradients on several meshes -> one norm over all of them, and the same factor for each."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# mesh, the axes along which a gradient is cut, dtype
_Key: TypeAlias = tuple[Any, tuple[int, ...], torch.dtype]


def clip_by_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    *,
    across: dist.ProcessGroup | None = None,
    counted_elsewhere: Collection[int] = (),
) -> Tensor:
    """Scale gradients to a norm over everything of at most ``max_norm`` and return the norm; a collective.

    torch's own function wants all gradients on one mesh, but weights that tensor parallelism leaves whole
    are on another than those it cuts.
    """
    own = list(parameters)
    groups = _by_mesh(own)
    counted = _by_mesh(p for p in own if id(p) not in counted_elsewhere) if counted_elsewhere else groups
    if not groups and across is None:
        return torch.zeros(())
    squares = [_sum_of_squares(grads, key) for key, grads in counted.items()]
    square = torch.stack(squares).sum() if squares else _zero_like(own)
    if across is not None:
        square = square.to(torch.float64)  # a stage without gradients does not know the dtype of the others
        dist.all_reduce(square, group=across)
    total = square.sqrt()
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # torch's rule, its constant included
    for grads in groups.values():
        torch._foreach_mul_(grads, factor.to(grads[0].dtype))
    return total


def _zero_like(parameters: list[nn.Parameter]) -> Tensor:
    device = parameters[0].device if parameters else torch.device("cpu")
    return torch.zeros((), device=device)


def _sum_of_squares(grads: list[Tensor], key: _Key) -> Tensor:
    """Return the squared norm of gradients over all ranks that hold parts of them, in fp32 or better."""
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    square = torch.stack(torch._foreach_norm(grads, 2, dtype=wide)).square().sum()
    mesh, axes = key[0], key[1]
    for axis in axes:
        dist.all_reduce(square, group=mesh.get_group(axis))
    return square


def clip_by_value(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """Clamp every gradient to ``[-limit, limit]``."""
    for parameter in parameters:
        grad: Any = parameter.grad
        if grad is not None:
            (grad.to_local() if isinstance(grad, DTensor) else grad).clamp_(-limit, limit)


def _by_mesh(parameters: Iterable[nn.Parameter]) -> dict[_Key, list[Tensor]]:
    """Group the local parts of gradients by mesh, sharded axes and dtype, in one order on every rank."""
    groups: dict[_Key, list[Tensor]] = {}
    for parameter in parameters:
        grad: Any = parameter.grad
        if grad is None:
            continue
        mesh, part = None, grad
        axes: tuple[int, ...] = ()
        if isinstance(grad, DTensor):
            axes = tuple(axis for axis, at in enumerate(grad.placements) if not at.is_replicate())
            mesh, part = grad.device_mesh, grad.to_local()
        groups.setdefault((mesh, axes, part.dtype), []).append(part)
    return groups


def meshes(parameters: Iterable[Tensor]) -> set[Any]:
    """Return the meshes that parameters live on, None for a plain one."""
    return {p.device_mesh if isinstance(p, DTensor) else None for p in parameters}
