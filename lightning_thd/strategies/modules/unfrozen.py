"""Weights that were frozen when DDP wrapped a module -> gradients averaged too once they are trained.

DDP reduces the gradients of what was trained at the start alone. A callback such as ``BackboneFinetuning``
unfreezes weights later; their gradients would stay those of each rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Unfrozen:
    """Averages the gradients of weights that DDP does not know.

    Args:
        model: just wrapped in DDP.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._group = model.process_group
        self._frozen = [p for p in model.parameters() if not p.requires_grad]

    def average(self) -> None:
        """Average the gradients of those that are trained by now over all ranks; a collective.

        A weight that no rank has used keeps no gradient, as on one process.
        """
        trained = [parameter for parameter in self._frozen if parameter.requires_grad]
        if not trained:
            return
        ranks = dist.get_world_size(self._group)
        used = torch.tensor(
            [p.grad is not None for p in trained], dtype=torch.int32, device=trained[0].device
        )
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self._group)
        found = [p for p, by_any in zip(trained, used.tolist(), strict=True) if by_any]
        for parameter in found:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for dtype in dict.fromkeys(parameter.dtype for parameter in found):
            self._average([p.grad for p in found if p.dtype == dtype and p.grad is not None], ranks)

    def _average(self, gradients: list[Tensor], ranks: int) -> None:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=self._group)
        flat /= ranks
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, mean in zip(gradients, torch.split(flat, sizes), strict=True):
            gradient.copy_(mean.view_as(gradient))


def watch(model: nn.Module | None) -> Unfrozen | None:
    """Return what averages weights unfrozen later; None where nothing is frozen or DDP does not reduce.

    Args:
        model: of a strategy that has been set up.
    """
    if not isinstance(model, DistributedDataParallel):
        return None
    return Unfrozen(model) if any(not p.requires_grad for p in model.parameters()) else None


def reduces_now(model: Any) -> bool:
    """Return whether DDP reduces gradients in the backward pass that has just ended."""
    return bool(getattr(model, "require_backward_grad_sync", False))
