"""Gradients of any layout -> their norms by name, as ``lightning.pytorch.utilities.grad_norm`` gives them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, Tensor]:
    """Compute the norm of every parameter's whole gradient and of all together; a collective where sharded.

    Lightning's function of this name fails on sharded gradients ("data is not allocated").

    Args:
        module: with gradients, whole or sharded; every rank calls it.
        norm_type: p above 0, or "inf".
        group_separator: between the name of the group and of the parameter.

    Returns:
        ``grad_2.0_norm/<name>`` and ``grad_2.0_norm_total``, ``[]`` each; nothing without gradients. Norms 3
        and 4 make a total of 5.

    Raises:
        ValueError: for p not above 0.
    """
    p = float(norm_type)
    if not p > 0 or math.isnan(p):
        raise ValueError(f"norm_type={norm_type!r}; wanted a number above 0, or 'inf'.")
    norms: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            norm = torch.linalg.vector_norm(parameter.grad.detach(), p)
            norms[f"grad_{p}_norm{group_separator}{name}"] = (
                norm.full_tensor() if isinstance(norm, DTensor) else norm
            )
    if norms:
        norms[f"grad_{p}_norm_total"] = torch.linalg.vector_norm(torch.stack(list(norms.values())), p)
    return norms
