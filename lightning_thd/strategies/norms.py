"""Gradients of any layout -> their norms by name, as ``lightning.pytorch.utilities.grad_norm`` gives them."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_thd.parallel.pipeline.cut import stages_in
from lightning_thd.parallel.pipeline.stage import Stage


def grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, Tensor]:
    """Compute the p-norm of each parameter's whole gradient and of all; p may be "inf"; a collective.

    Lightning's function of this name fails on sharded gradients ("data is not allocated").

    Returns:
        ``grad_2.0_norm/<name>`` and ``grad_2.0_norm_total``, ``[]`` each; nothing without gradients. Norms 3
        and 4 make a total of 5. A rank of a pipeline gets the norms of its own layers, and the total of all.

    Raises:
        ValueError: for p not above 0.
    """
    try:
        p = float(norm_type)
    except (TypeError, ValueError):
        p = math.nan  # refused with other numbers that make no norm
    if not p > 0:
        raise ValueError(f"norm_type={norm_type!r}; wanted a number above 0, or 'inf'.")
    norms: dict[str, Tensor] = {}
    counted: list[Tensor] = []
    stage = next(stages_in(module), None)
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            norm = torch.linalg.vector_norm(parameter.grad.detach(), p)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            norms[f"grad_{p}_norm{group_separator}{name}"] = norm
            if stage is None or stage.channel.rank == 0 or parameter is not stage.tied:
                counted.append(norm)
    if norms or stage is not None:
        own = (
            torch.linalg.vector_norm(torch.stack(counted), p)
            if counted
            else torch.zeros((), dtype=torch.float64)
        )
        norms[f"grad_{p}_norm_total"] = own if stage is None else _over_stages(own, p, stage)
    return norms


def _over_stages(own: Tensor, p: float, stage: Stage) -> Tensor:
    """Combine the norms of a pipeline's stages; a collective of its ranks."""
    found: list[float] = [0.0] * stage.channel.ranks
    dist.all_gather_object(found, float(own), group=stage.channel.down)
    total: Tensor = torch.linalg.vector_norm(torch.tensor(found, dtype=torch.float64), p)
    return total.to(own)
