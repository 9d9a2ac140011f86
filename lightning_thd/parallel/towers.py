"""A multimodal model -> ranks whose packs are text alone also take part in its towers' gradients.

A vision tower runs only where a pack has images. Gradients are averaged by collectives over the same weights
on every rank, so a rank that skips the tower would leave the others waiting. Where any rank has images, all
give the tower's weights a gradient, of zero if need be; where none has, none does, as in one process.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.parallel.exchange import keep_path


def towers_of(model: nn.Module) -> list[nn.Module]:
    """List the modules of a multimodal model beside its language model, such as a vision tower.

    Returns:
        Modules with parameters, such as a vision tower and its projector; none for a model of text.
    """
    embedding, head = (_called(model, f"get_{side}_embeddings") for side in ("input", "output"))
    language = _language_model(model, embedding)
    found: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if child in (language, head):
                continue
            if any(inner in (language, head) for inner in child.modules()):
                walk(child)
            elif any(True for _ in child.parameters()):
                found.append(child)

    if language is not None and language is not model:
        walk(model)
    return found


def _called(model: Any, getter: str) -> nn.Module | None:
    try:
        part = getattr(model, getter, lambda: None)()
    except NotImplementedError:  # transformers' word for a model that has none
        return None
    return part if isinstance(part, nn.Module) else None


def _language_model(model: nn.Module, embedding: nn.Module | None) -> nn.Module | None:
    """Return the innermost transformers model that holds the input embedding."""
    around = [
        module
        for module in model.modules()
        if hasattr(module, "_no_split_modules") and any(inner is embedding for inner in module.modules())
    ]
    return around[-1] if around else None


class TowerPaths:
    """Ties a model's towers to its embedding, so that every backward pass reaches their gradients.

    Attributes:
        active: whether to; asked in the forward call of the embedding.
    """

    def __init__(self, model: Any) -> None:
        self.active = False
        self._towers = towers_of(model)
        model.get_input_embeddings().register_forward_hook(self._tie)

    def _tie(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        if not (self.active and torch.is_grad_enabled()):
            return out
        # Looked up here, in the middle of the model's forward call, when FSDP2 has gathered them.
        weights = [p for tower in self._towers for p in tower.parameters() if p.requires_grad]
        return keep_path(out, *weights)


def trains_towers(model: nn.Module) -> bool:
    """Return whether a model has a tower with parameters to train."""
    return any(p.requires_grad for tower in towers_of(model) for p in tower.parameters())


def any_rank_sees(batch: object, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether any rank's batch has images or the like; one all-reduce of 4 bytes.

    Args:
        batch: of this rank; one that is no ``THDBatch`` or ``THDStep`` counts as if it had.
        group: ranks whose gradients are averaged.
        device: where the group's backend communicates.
    """
    seen = torch.tensor(float(_sees(batch)), device=device)
    dist.all_reduce(seen, dist.ReduceOp.MAX, group=group)
    return bool(seen)


def _sees(batch: object) -> bool:
    if isinstance(batch, THDStep):
        return any(map(_sees, batch.microbatches))
    if not isinstance(batch, THDBatch):
        return True
    slots = batch.input_ids.shape[-1]
    return any(value.shape[:2] != (1, slots) for value in batch.extras.values())
