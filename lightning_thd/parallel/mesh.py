"""The sizes of the parallel axes and the number of processes -> the mesh of ranks.

The axes are, from the outermost to the innermost: pipeline, data, context, tensor. So the ranks of a
tensor-parallel group, which exchange the most data, are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_thd._checks import whole_number
from lightning_thd._private import private

DATA = "data_parallel"
CONTEXT = "context_parallel"
TENSOR = "tensor_parallel"
PIPELINE = "pipeline_parallel"
EXPERT = "expert_parallel"
AXES = (DATA, CONTEXT, TENSOR)


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisSizes:
    """The number of ranks along each parallel axis."""

    data: int = 1  # along this axis, ranks read different data
    context: int = 1  # ranks hold different slots of a pack
    tensor: int = 1  # ranks hold different rows or columns of weights
    pipeline: int = 1  # ranks hold different layers of a model
    expert: int = 1  # ranks hold different experts; they are ranks of a stage, whatever their other axes

    @property
    def world(self) -> int:
        """Return the number of processes of the job."""
        return self.data * self.peers

    @property
    def peers(self) -> int:
        """Return the number of ranks that work on the same data."""
        return self.pipeline * self.context * self.tensor

    @property
    def stage(self) -> int:
        """Return the number of ranks that hold the same layers."""
        return self.world // self.pipeline

    def data_rank(self, rank: int) -> int:
        """Return a rank's place on the data axis: 0 for ranks 0 and 1 of ``AxisSizes(data=2, context=2)``."""
        return rank % self.stage // (self.context * self.tensor)

    def readers(self, data: int) -> list[int]:
        """Return the global ranks at place ``data`` on the data axis; they read the same data."""
        return [rank for rank in range(self.world) if self.data_rank(rank) == data]


def resolve_sizes(
    world: int,
    *,
    data: int | Literal["auto"] = "auto",
    context: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    expert: int = 1,
) -> AxisSizes:
    """Check sizes against the number of processes; ``data="auto"`` is that number over the other sizes.

    ``expert`` is no factor of that product: ranks of the other axes hold different experts.
    """
    check_sizes(data=data, pipeline=pipeline, context=context, tensor=tensor, expert=expert)
    shown = f"context_parallel_size={context} x tensor_parallel_size={tensor}"
    if pipeline > 1:
        shown = f"pipeline_parallel_size={pipeline} x {shown}"

    if data == "auto":
        peers = pipeline * context * tensor
        if world % peers:
            raise ValueError(
                f"{shown} does not divide the {world} processes of the job. Start a multiple of {peers} "
                "processes, or lower a size."
            )
        data = world // peers
    sizes = AxisSizes(data=data, context=context, tensor=tensor, pipeline=pipeline, expert=expert)
    if sizes.world != world:
        raise ValueError(
            f"data_parallel_size={data} x {shown} is {sizes.world}, but the job has {world} processes. Start "
            f"{sizes.world} processes, or use data_parallel_size='auto'."
        )

    # The dispatch divides the tokens of tensor-parallel ranks among them, so it must reach all of them.
    if expert > 1 and (sizes.stage % expert or expert % tensor):
        raise ValueError(
            f"expert_parallel_size={expert}, but {sizes.stage} ranks hold the same layers (data x context x "
            f"tensor), of which {tensor} are tensor-parallel; wanted a divisor of {sizes.stage} that is a "
            f"multiple of {tensor}. Change expert_parallel_size, or the number of processes."
        )
    return sizes


def check_sizes(*, data: object, replicas: object = 1, **others: object) -> None:
    """Raise unless every size is a whole number above 0; ``data`` may also be "auto"."""
    if data != "auto":
        whole_number(data, "data_parallel_size", least=1, advice="Or pass 'auto'.")
    for name, size in others.items():
        whole_number(size, f"{name}_parallel_size", least=1)
    whole_number(replicas, "data_parallel_replicas", least=1, advice="Set it to the number of nodes.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Meshes:
    """The mesh of a job and the flattened meshes of its axes."""

    axes: DeviceMesh  # data x context x tensor, after a pipeline axis if it is larger than 1
    data_context: DeviceMesh  # data and context as one axis: ranks of a stage that see different tokens
    peers: DeviceMesh  # all axes but data as one axis: ranks that read the same data
    stage: DeviceMesh  # all axes but pipeline as one axis: ranks that hold the same layers
    shards: DeviceMesh  # FSDP2's mesh: the ranks of ``data_context``, on one axis or as replicas x shards
    tensor: DeviceMesh  # the tensor-parallel ranks, an axis of the mesh that ``shards`` comes from
    experts: DeviceMesh | None  # the ranks that hold different experts; None if no experts are distributed
    expert_shards: DeviceMesh | None  # the ranks that hold the same experts, FSDP2's mesh for these

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the process group of this rank along one of the axes."""
        group: dist.ProcessGroup = self.axes.get_group(axis)
        return group


def make_meshes(sizes: AxisSizes, device_type: str, *, replicas: int = 1) -> Meshes:
    """Build the mesh and its process groups; a collective over the whole job."""
    if sizes.data % replicas:
        raise ValueError(
            f"data_parallel_replicas={replicas!r} does not divide the {sizes.data} data-parallel ranks. Set "
            "it to the number of nodes, or to a divisor of the data-parallel ranks."
        )

    shape: tuple[int, ...] = (sizes.data, sizes.context, sizes.tensor)
    names: tuple[str, ...] = (DATA, CONTEXT, TENSOR)
    names_of_peers: tuple[str, ...] = (CONTEXT, TENSOR)
    if sizes.pipeline > 1:
        shape = (sizes.pipeline, *shape)
        names = (PIPELINE, *names)
        names_of_peers = (PIPELINE, *names_of_peers)
    axes = init_device_mesh(device_type, shape, mesh_dim_names=names)

    # Users call fully_shard over device_mesh["data_context_parallel"]; only flattening gives that name.
    flatten = private("torch.distributed.device_mesh.DeviceMesh._flatten")
    data_context = flatten(axes[DATA, CONTEXT], "data_context_parallel")
    peers = flatten(axes[names_of_peers], "peers")
    stage = flatten(axes[DATA, CONTEXT, TENSOR], "stage")
    shards = data_context
    tensor = axes[TENSOR]
    if replicas > 1:
        shards, tensor = _replicated(sizes, device_type, replicas)
    experts = expert_shards = None
    if sizes.expert > 1:
        experts, expert_shards = _by_experts(sizes, device_type)
    return Meshes(
        axes=axes,
        data_context=data_context,
        shards=shards,
        tensor=tensor,
        peers=peers,
        stage=stage,
        experts=experts,
        expert_shards=expert_shards,
    )


def _replicated(sizes: AxisSizes, device_type: str, replicas: int) -> tuple[DeviceMesh, DeviceMesh]:
    """Return FSDP2's mesh, replicas x shards, and a mesh of the same root for tensor parallelism.

    They have a root of their own: torch cannot shard over two axes if one is flattened.
    """
    shape = (sizes.pipeline, replicas, sizes.data * sizes.context // replicas, sizes.tensor)
    names = (PIPELINE, "replicas", "shards", TENSOR)
    weights = init_device_mesh(device_type, shape, mesh_dim_names=names)
    return weights["replicas", "shards"], weights[TENSOR]


def _by_experts(sizes: AxisSizes, device_type: str) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the meshes of ranks with different experts, which are neighbours, and with the same ones."""
    shape = (sizes.pipeline, sizes.stage // sizes.expert, sizes.expert)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=(PIPELINE, "expert_shards", EXPERT))
    return mesh[EXPERT], mesh["expert_shards"]


def another_group(sizes: AxisSizes, *, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Create one more process group of this rank's pipeline; all ranks of the job must call this."""
    rank = dist.get_rank()
    group_of_rank: dist.ProcessGroup | None = None
    for place in range(sizes.stage):  # torch wants every rank to create every group, in one order
        ranks = list(range(place, sizes.world, sizes.stage))
        group = dist.new_group(ranks, timeout=timeout)
        if rank in ranks:
            group_of_rank = group
    assert group_of_rank is not None
    return group_of_rank
