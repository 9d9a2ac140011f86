"""What this rank has -> what every rank of a group has; and the groups and devices for it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 renamed it; the old name warns there, and 2.11 lacks the new one.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather_ints(values: Sequence[int], *, group: Any, device: torch.device) -> list[list[int]]:
    """Gather equally many integers from every rank of ``group``, in its order; None is the world."""
    if group_size(group) == 1:
        return [list(values)]
    mine = torch.tensor(values, dtype=torch.int64).to(device)
    everyone = torch.empty(group_size(group) * len(values), dtype=torch.int64, device=device)
    _all_gather(everyone, mine, group=group)
    rows: list[list[int]] = everyone.view(-1, len(values)).tolist()
    return rows


def group_size(group: Any) -> int:
    """Return the number of ranks in ``group``, None being the world; 1 if nothing is distributed."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def data_parallel_group(strategy: Any) -> Any:
    """Return the group of a Trainer's ranks with different sequences; None is the world."""
    group = getattr(strategy, "data_parallel_group", None)
    if group is not None:
        return group
    mesh = getattr(strategy, "_device_mesh", None)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    return mesh.get_group("data_parallel") if mesh is not None and "data_parallel" in names else None


def stage_group(strategy: Any) -> Any:
    """Return the group of a Trainer's ranks that hold the same layers; None is the world."""
    axes: Any = getattr(strategy, "_axes", None)
    meshes = getattr(axes, "meshes", None)
    return None if meshes is None or axes.sizes.pipeline == 1 else meshes.stage.get_group()


def communication_device(group: Any, device: torch.device) -> torch.device:
    """Return the device for a collective over ``group`` of a rank that works on ``device``."""
    if not (dist.is_available() and dist.is_initialized()):
        return torch.device("cpu")
    return torch.device("cpu") if dist.get_backend(group) == "gloo" else device


def host_group(ranks: list[int], timeout_s: float | None = None) -> dist.ProcessGroup:
    """Create a gloo group of some ranks, which communicates in CPU memory; only those ranks call this."""
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    group: dist.ProcessGroup = dist.new_group(
        ranks, backend="gloo", timeout=timeout, use_local_synchronization=True
    )
    return group


def on_host(group: dist.ProcessGroup, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Return a group of the same ranks that communicates in CPU memory: itself under gloo, else a new one."""
    if dist.get_backend(group) == "gloo":
        return group
    timeout_s = None if timeout is None else timeout.total_seconds()
    return host_group(dist.get_process_group_ranks(group), timeout_s)


def broadcast_object(value: Any, group: dist.ProcessGroup | None, source: int) -> Any:
    """Return, on every rank of a group, the object that its global rank ``source`` gives."""
    found = [value]
    dist.broadcast_object_list(found, source, group=group)
    return found[0]
