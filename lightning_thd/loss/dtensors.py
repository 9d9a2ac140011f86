"""DTensors among a loss's operands -> plain tensors of this rank, and the group sharing the vocabulary."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor


def is_dtensor(tensor: object) -> bool:
    """Return whether a tensor is distributed, without importing the distributed package for it."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def plain(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor; a plain tensor unchanged."""
    local: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return local


def vocabulary_group(weight: Any) -> dist.ProcessGroup | None:
    """Return the group over which rows of the weight are sharded; None if every rank has all of them."""
    sharded = [(axis, p) for axis, p in enumerate(weight.placements) if not p.is_replicate()]
    if not sharded:
        return None
    axis, placement = sharded[0]
    if len(sharded) > 1 or not placement.is_shard(0):
        raise ValueError(
            f"The head's weight is placed as {tuple(weight.placements)}, wanted rows of the vocabulary over "
            "one mesh axis (Shard(0), tensor parallel 'colwise') or replicated. Inside FSDP2, call the "
            "module that fully_shard was applied to, so that it gathers the weight first."
        )
    group: dist.ProcessGroup = weight.device_mesh.get_group(axis)
    return group


def local_hidden(hidden: Any, group: dist.ProcessGroup | None) -> tuple[Tensor, bool]:
    """Gather distributed hidden states; also return whether their gradient is a partial sum over ranks."""
    from torch.distributed.tensor import Partial, Replicate

    if any(not placement.is_replicate() for placement in hidden.placements):
        hidden = hidden.redistribute(placements=[Replicate()] * len(hidden.placements))
    if group is None or len(hidden.placements) != 1:
        return hidden.to_local(), False
    # The gradient stays a partial sum: DTensor reduces it, or reduce-scatters it under sequence parallel.
    return hidden.to_local(grad_placements=[Partial()]), True


def group_of_operands(
    hidden: Tensor, weight: Any, group: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    """Return the tensor-parallel group of a distributed weight passed to a fused loss."""
    own = vocabulary_group(weight)
    if group is not None:
        if own is None or dist.get_process_group_ranks(own) != dist.get_process_group_ranks(group):
            raise ValueError(
                f"weight is a DTensor placed as {tuple(weight.placements)} and tp_group another group, "
                "wanted the group its rows are sharded over. Leave tp_group out, or pass weight.to_local()."
            )
        return group
    names = weight.device_mesh.mesh_dim_names or ()
    cut = [name for name, p in zip(names, weight.placements, strict=False) if not p.is_replicate()]
    if is_dtensor(hidden) or any("tp" in name or "tensor" in name for name in cut[:1]):
        return own
    raise ValueError(
        f"weight is a DTensor placed as {tuple(weight.placements)} on {weight.device_mesh} and hidden a "
        "plain tensor, so it is unknown whether the ranks hold the same tokens. If they do (tensor "
        "parallel), pass tp_group=weight.device_mesh.get_group(); if not (FSDP), call this inside the module "
        "that fully_shard was applied to, or pass a gathered weight."
    )
