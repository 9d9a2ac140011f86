"""Values of this rank -> the values of all ranks of a group, or an error on all ranks if they differ."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_thd.batch.thd_batch import Packed
from lightning_thd.parallel.mesh import DATA, AxisSizes

# torch 2.13 renamed the function and warns about the old name; torch 2.11 lacks the new name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

ALONE: Any = object()  # the group of a Trainer that runs on this rank only, in a job of several ranks


def gather_ints(values: Sequence[int], *, group: Any, device: torch.device) -> list[list[int]]:
    """Gather equally many integers from every rank of ``group``, in rank order; group None is the world."""
    if group_size(group) == 1:
        return [list(values)]
    mine = torch.tensor(values, dtype=torch.int64).to(device)
    everyone = torch.empty(group_size(group) * len(values), dtype=torch.int64, device=device)
    _all_gather(everyone, mine, group=group)
    rows: list[list[int]] = everyone.view(-1, len(values)).tolist()
    return rows


def group_size(group: Any) -> int:
    """Return the number of ranks in ``group``, None being the world; 1 if nothing is distributed."""
    return 1 if _is_alone(group) else dist.get_world_size(group)


def _is_alone(group: Any) -> bool:
    """Return whether a group is this rank only, in a job of several or without one."""
    return group is ALONE or not (dist.is_available() and dist.is_initialized())


def data_parallel_group(strategy: Any) -> Any:
    """Return the group over which a Trainer's ranks read different sequences; None is the world."""
    if getattr(strategy, "world_size", 1) == 1:
        return ALONE
    group = getattr(strategy, "data_parallel_group", None)
    if group is not None:
        return group
    from lightning.pytorch.strategies import ModelParallelStrategy

    if not isinstance(strategy, ModelParallelStrategy):
        return None  # all ranks read different data, also those of an FSDPStrategy's mesh
    mesh = strategy.device_mesh
    return mesh.get_group(DATA) if DATA in (mesh.mesh_dim_names or ()) else None


def stage_group(strategy: Any) -> Any:
    """Return the group of a Trainer's ranks that hold the same layers; None is the world."""
    if getattr(strategy, "world_size", 1) == 1:
        return ALONE
    axes: Any = getattr(strategy, "_axes", None)
    meshes = getattr(axes, "meshes", None)
    if meshes is None or axes.sizes.pipeline == 1:
        return None
    return meshes.stage.get_group()


def communication_device(group: Any, device: torch.device) -> torch.device:
    """Return the device of tensors for a collective over ``group``: the CPU under gloo or without groups."""
    if _is_alone(group) or dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return device


def host_group(ranks: list[int], timeout_s: float | None = None) -> dist.ProcessGroup:
    """Create a gloo group of some ranks, which communicates in CPU memory; only those ranks call this."""
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    group: dist.ProcessGroup = dist.new_group(
        ranks, backend="gloo", timeout=timeout, use_local_synchronization=True
    )
    return group


def on_host(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of the same ranks that communicates in CPU memory: itself under gloo, else a new one."""
    if dist.get_backend(group) == "gloo":
        return group
    return host_group(dist.get_process_group_ranks(group))


def broadcast_object(value: Any, group: dist.ProcessGroup | None, source: int) -> Any:
    """Return the object of the global rank ``source`` on every rank of a group."""
    objects = [value]
    dist.broadcast_object_list(objects, source, group=group)
    return objects[0]


def all_agree(agrees: bool, device: torch.device, group: Any = None) -> bool:
    """Return whether ``agrees`` is True on every rank of ``group``; None is the world."""
    return all(vote for (vote,) in gather_ints([int(agrees)], group=group, device=device))


def require_same(
    value: int, device: torch.device, message: str, group: dist.ProcessGroup | None = None
) -> None:
    """Raise ValueError with the message, on every rank of a group, unless all have the same number."""
    rows = gather_ints([value], group=group, device=device)
    if len({number for (number,) in rows}) > 1:
        raise ValueError(message)


def digests(batch: Packed) -> tuple[int, int]:
    """Return int63 hashes: of all that a batch holds, and of what must be equal on all ranks."""
    everything = hashlib.sha256()
    for each in batch.packs:
        everything.update(repr((each.sequence_ids, each.lengths)).encode())
        optional = dict(each.extras)
        if each.weights is not None:
            optional["weights"] = each.weights
        everything.update(repr(list(optional)).encode())
        tensors = (each.input_ids, each.token_targets, each.token_offsets, each.position_ids)
        for tensor in (*tensors, *optional.values()):
            # As bytes, because numpy has no bfloat16.
            everything.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())

    everything.update(repr([each.loss_scale for each in batch.packs]).encode())
    return int63(everything.digest()), int63(hashlib.sha256(repr(batch.agreed).encode()).digest())


def check_agreement(batches: Sequence[Packed], sizes: AxisSizes, device: torch.device) -> None:
    """Raise, on every rank, unless peers read the same packs and all steps have one size and loss scale."""
    everything, shared = zip(*(digests(batch) for batch in batches), strict=True)
    hashes = [int63(hashlib.sha256(repr(part).encode()).digest()) for part in (everything, shared)]
    of_ranks = gather_ints(hashes, group=None, device=device)
    for data in range(sizes.data):
        ranks = sizes.readers(data)
        if len({of_ranks[rank][0] for rank in ranks}) > 1:
            raise ValueError(
                f"Ranks {', '.join(map(str, ranks))} share one pack ({sizes.context} context-parallel x "
                f"{sizes.tensor} tensor-parallel x {sizes.pipeline} pipeline ranks) but read different "
                "ones. Give samplers and datasets the rank and size of strategy.distributed_sampler_kwargs."
            )
    if len({hash_of_shared for _, hash_of_shared in of_ranks}) > 1:
        raise ValueError(
            "Ranks have steps with different numbers of microbatches or loss scales. Plan steps from the "
            "same lengths and seed on every rank, as THDDataModule does."
        )


def int63(digest: bytes) -> int:
    """Return the first 63 bits of a digest as a number, which fits a signed int64."""
    return int.from_bytes(digest[:8], "big") >> 1
