"""A LightningModule -> its models sharded by FSDP2 over all ranks that see different tokens.

A vision tower runs only if a pack has images. FSDP2 reduces only gradients that exist, and the job can hang
if ranks reduce different gradients. So if any rank has images, all ranks give the tower's weights a gradient,
which is zero on ranks without images.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_thd._find import has_parameters, models_in
from lightning_thd._private import private_of
from lightning_thd.batch.thd_batch import Packed
from lightning_thd.parallel.exchange import keep_path, local

_PATHS = "_thd_tower_paths"  # the attribute of a model that keeps its ``TowerPaths``


def shard_parameters(
    module: nn.Module, mesh: DeviceMesh, *, policy: MixedPrecisionPolicy, reshard_after_forward: bool
) -> None:
    """Shard each model of a LightningModule by FSDP2: layers one by one, and all other weights together."""
    outside = [name for name, _ in module.named_parameters(recurse=False)]
    if outside:
        raise ValueError(
            f"{type(module).__name__} holds the parameters {outside} itself, but FSDP2 gathers only the "
            "weights of submodules, when their forward is called. Move them into a submodule."
        )
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    for root in models_of(module):
        for layer in layers_of(root):
            fully_shard(layer, reshard_after_forward=reshard_after_forward, **options)
        fully_shard(root, **options)


def models_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a LightningModule's models: children with parameters, also in ModuleLists and ModuleDicts."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from models_of(child)
        elif has_parameters(child):
            yield child


def layers_of(model: nn.Module) -> list[nn.Module]:
    """List the modules that FSDP2 gathers one at a time.

    These are the modules of the classes in ``_no_split_modules``, or without such a list, the elements of
    ModuleLists. Layers of a vision tower may run on some ranks only, so FSDP2 gathers them with the model.
    """
    towers = towers_of(model)
    names = _names_of_layers(model)
    layers: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if child in towers:
                continue
            is_layer = type(child).__name__ in names if names else isinstance(module, nn.ModuleList)
            if not is_layer:
                walk(child)
            elif has_parameters(child):
                layers.append(child)

    walk(model)
    return layers


def _names_of_layers(model: nn.Module) -> set[str]:
    """Return the names of the classes of a transformers model's layers; none for other models."""
    name = "transformers.PreTrainedModel._no_split_modules"
    if any(base.__name__ == "PreTrainedModel" for base in type(model).__mro__):
        return set(private_of(model, name) or ())
    return set(getattr(model, name.rpartition(".")[2], None) or ())  # PEFT's wrappers hand it on


def reshard(module: nn.Module) -> None:
    """Free weights that FSDP2 left gathered: an optimizer over gathered copies would not train the shards."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def is_sharded(module: nn.Module) -> bool:
    """Return whether FSDP2 or tensor parallelism was applied to any part of a module already."""
    cut = any(isinstance(parameter, DTensor) for parameter in module.parameters())
    return cut or any(isinstance(child, FSDPModule) for child in module.modules())


def towers_of(model: nn.Module) -> list[nn.Module]:
    """List a multimodal model's parts with weights besides language model and head, like a vision tower."""
    model = _with_embedding(model)
    embedding = _result_of(model, "get_input_embeddings")
    head = _result_of(model, "get_output_embeddings")
    language = _innermost_around(embedding, model)
    if language is None or language is model:
        return []

    towers: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if child in (language, head):
                continue
            if any(part in (language, head) for part in child.modules()):
                walk(child)
            elif has_parameters(child):
                towers.append(child)

    walk(model)
    return towers


def _innermost_around(embedding: nn.Module | None, model: nn.Module) -> nn.Module | None:
    """Return the innermost transformers model that holds the input embedding: the language model."""
    around = [
        inner
        for _, inner in models_in(model)  # from the outside in
        if any(part is embedding for part in inner.modules())
    ]
    return around[-1] if around else None


def _with_embedding(model: nn.Module) -> Any:
    """Return the model, or the transformers model inside a wrapper that lacks ``get_input_embeddings``."""
    if hasattr(model, "get_input_embeddings"):
        return model
    return next((inner for _, inner in models_in(model)), model)


def _result_of(model: Any, getter: str) -> nn.Module | None:
    """Return the module that a model's method of this name returns, or None."""
    method = getattr(model, getter, None)
    if method is None:
        return None
    try:
        part = method()
    except NotImplementedError:  # the model has no such module
        return None
    return part if isinstance(part, nn.Module) else None


class TowerPaths:
    """While ``active``, adds zeros to the gradients of tower weights, by way of the embedding's output."""

    def __init__(self, model: nn.Module) -> None:
        self.active = False
        self._towers = towers_of(model)
        _with_embedding(model).get_input_embeddings().register_forward_hook(self._tie)

    def _tie(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        """Return the embedding's output with the towers' weights in its graph; a forward hook."""
        if not (self.active and torch.is_grad_enabled()):
            return out
        # Look the weights up only now, inside the model's forward call, in which FSDP2 has gathered them.
        weights = [local(p) for tower in self._towers for p in tower.parameters() if p.requires_grad]
        return keep_path(out, *weights)


def tower_paths(module: nn.Module) -> Iterator[TowerPaths]:
    """Yield the ``TowerPaths`` of models that train towers; those that are missing are created."""
    for model in models_of(module):
        paths = model.__dict__.get(_PATHS)
        if paths is None and trains_towers(model) and _is_gathered_with_model(model):
            paths = TowerPaths(model)
            model.__dict__[_PATHS] = paths
        if paths is not None:
            yield paths


def trains_towers(model: nn.Module) -> bool:
    """Return whether a model has a tower with parameters to train."""
    return any(p.requires_grad for tower in towers_of(model) for p in tower.parameters())


def _is_gathered_with_model(model: nn.Module) -> bool:
    """Return whether FSDP2 gathers, or will gather, the weights of towers together with the model's."""
    return not any(isinstance(x, FSDPModule) for tower in towers_of(model) for x in tower.modules())


def any_rank_sees(batch: object, group: dist.ProcessGroup) -> bool:
    """Return whether any rank's batch may have inputs of a tower; one all-reduce of 4 bytes in CPU memory."""
    seen = torch.tensor(float(_sees(batch)))
    dist.all_reduce(seen, dist.ReduceOp.MAX, group=group)
    return bool(seen)


def _sees(batch: object) -> bool:
    """Return whether a batch may have inputs of a tower, which are extras without one value per slot."""
    if not isinstance(batch, Packed):
        return True  # unknown; zeros for a tower that runs change nothing
    return any(
        value.shape[:2] != (1, pack.input_ids.shape[-1])
        for pack in batch.packs
        for name, value in pack.extras.items()
        if name != "labels"
    )
