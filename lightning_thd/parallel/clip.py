"""Gradients on several meshes -> one norm over all of them, and the same factor for each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def clip_by_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients so that their norm over everything is at most ``max_norm``; a collective.

    torch's own function wants all gradients on one mesh, but weights that tensor parallelism leaves whole
    are on another than those it cuts.

    Args:
        parameters: with gradients, DTensors or plain.
        max_norm: the largest norm.

    Returns:
        The norm before, ``[]``, the same on every rank.
    """
    groups = list(_by_mesh(parameters).values())
    if not groups:
        return torch.zeros(())
    norms = []
    for group in groups:
        norm: Any = torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # torch's rule, its constant included
    for group in groups:
        for parameter in group:
            grad: Any = parameter.grad
            (grad.to_local() if isinstance(grad, DTensor) else grad).mul_(factor.to(grad.dtype))
    return total


def clip_by_value(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """Clamp every gradient to ``[-limit, limit]``."""
    for parameter in parameters:
        grad: Any = parameter.grad
        if grad is not None:
            (grad.to_local() if isinstance(grad, DTensor) else grad).clamp_(-limit, limit)


def _by_mesh(parameters: Iterable[nn.Parameter]) -> dict[Any, list[nn.Parameter]]:
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        grad: Any = parameter.grad
        if grad is not None:
            key = grad.device_mesh if isinstance(grad, DTensor) else None
            groups.setdefault(key, []).append(parameter)
    return groups


def meshes(parameters: Iterable[Tensor]) -> set[Any]:
    """The meshes that parameters live on, None for plain ones."""
    return {p.device_mesh if isinstance(p, DTensor) else None for p in parameters}
