"""A LightningModule -> its models sharded by FSDP2 over all ranks that see different tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_thd.parallel.towers import towers_of


def shard_parameters(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
) -> list[FSDPModule]:
    """Shard every model of a LightningModule by FSDP2, layer by layer; a vision tower goes with the root.

    Args:
        module: the LightningModule; its children with parameters are the models it calls.
        mesh: one axis, the ranks among which weights are shared and gradients averaged.
        policy: dtypes of weights in products, and of gradient sums.
        reshard_after_forward: free the gathered weights of a layer between its forward and backward pass.

    Raises:
        ValueError: for parameters that no model holds.
    """
    _refuse_own_parameters(module)
    roots: list[FSDPModule] = []
    how: dict[str, Any] = {"mesh": mesh, "mp_policy": policy or MixedPrecisionPolicy()}
    for root in models_of(module):
        for layer in layers_of(root):
            fully_shard(layer, reshard_after_forward=reshard_after_forward, **how)
        roots.append(fully_shard(root, **how))
    if mesh.device_type == "cpu":  # gloo has no averaging reduce-scatter
        for sharded in roots:
            sharded.set_force_sum_reduction_for_comms(True)
    return roots


def _refuse_own_parameters(module: nn.Module) -> None:
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if own:
        raise ValueError(
            f"{type(module).__name__} holds the parameters {own} itself, and FSDP2 gathers weights when the "
            "forward of a submodule is called. Move them into an nn.Module that it calls."
        )


def models_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the models a LightningModule calls: its children, and those inside ModuleList and ModuleDict."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from models_of(child)
        elif any(True for _ in child.parameters()):
            yield child


def layers_of(model: nn.Module) -> list[nn.Module]:
    """List the modules that FSDP2 gathers one at a time: a model's layers, else list elements.

    A vision tower's are not among them: they run on some ranks only, so they are gathered with the model,
    which all ranks run.
    """
    towers = towers_of(model)
    names: set[str] = set(getattr(model, "_no_split_modules", None) or ())
    found: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if child in towers:
                continue
            if type(child).__name__ in names or (not names and isinstance(module, nn.ModuleList)):
                if any(True for _ in child.parameters()):
                    found.append(child)
            else:
                walk(child)

    walk(model)
    return found


def reshard(module: nn.Module) -> None:
    """Free weights that FSDP2 left gathered, as it does with the root's after evaluation.

    ``parameters()`` gives the gathered copies until then, and an optimizer made of them trains nothing.
    """
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def is_sharded(module: nn.Module) -> bool:
    """Return whether FSDP2 or tensor parallelism was applied to any part of a module already."""
    cut = any(isinstance(parameter, DTensor) for parameter in module.parameters())
    return cut or any(isinstance(child, FSDPModule) for child in module.modules())


def memory_of_rank(device: torch.device) -> int:
    """Return the bytes of memory that a rank may use: its device's, or its share of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    pages: int = os.sysconf("SC_PHYS_PAGES")
    return pages * os.sysconf("SC_PAGE_SIZE") // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
