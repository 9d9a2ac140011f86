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

DATA, CONTEXT, TENSOR = AXES = ("data_parallel", "context_parallel", "tensor_parallel")
PIPELINE = "pipeline_parallel"


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisSizes:
    """The number of ranks along each parallel axis."""

    data: int = 1  # along this axis, ranks read different data
    context: int = 1  # ranks hold different slots of a pack
    tensor: int = 1  # ranks hold different rows or columns of weights
    pipeline: int = 1  # ranks hold different layers of a model

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
    world: int, *, data: int | Literal["auto"] = "auto", context: int = 1, tensor: int = 1, pipeline: int = 1
) -> AxisSizes:
    """Check sizes against the number of processes; ``data="auto"`` is that number over the other sizes."""
    given = {"pipeline": pipeline, "context": context, "tensor": tensor}
    check_sizes(data=data, **given)
    shown = " x ".join(
        f"{name}_parallel_size={size}" for name, size in given.items() if name != "pipeline" or size > 1
    )
    model = pipeline * context * tensor
    if data == "auto":
        if world % model:
            raise ValueError(
                f"{shown} does not divide the {world} processes of the job. Start a multiple of {model} "
                "processes, or lower a size."
            )
        data = world // model
    sizes = AxisSizes(data=data, context=context, tensor=tensor, pipeline=pipeline)
    if sizes.world != world:
        raise ValueError(
            f"data_parallel_size={data} x {shown} is {sizes.world}, but the job has {world} processes. Start "
            f"{sizes.world} processes, or use data_parallel_size='auto'."
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
    names: tuple[str, ...] = AXES
    shared: tuple[str, ...] = (CONTEXT, TENSOR)
    if sizes.pipeline > 1:
        shape, names, shared = (sizes.pipeline, *shape), (PIPELINE, *names), (PIPELINE, *shared)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    data_context = mesh[DATA, CONTEXT]._flatten("data_context_parallel")
    shards, tensor = data_context, mesh[TENSOR]
    if replicas > 1:  # this needs another mesh: torch cannot shard over two axes if one is flattened
        sharing = (sizes.pipeline, replicas, sizes.data * sizes.context // replicas, sizes.tensor)
        named = (PIPELINE, "replicas", "shards", TENSOR)
        weights = init_device_mesh(device_type, sharing, mesh_dim_names=named)
        shards, tensor = weights["replicas", "shards"], weights[TENSOR]
    return Meshes(
        axes=mesh,
        data_context=data_context,
        shards=shards,
        tensor=tensor,
        peers=mesh[shared]._flatten("peers"),
        stage=mesh[DATA, CONTEXT, TENSOR]._flatten("stage"),
    )


def another_group(sizes: AxisSizes, *, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Create one more process group of this rank's pipeline; all ranks of the job must call this."""
    rank = dist.get_rank()
    own: dist.ProcessGroup | None = None
    for place in range(sizes.stage):
        ranks = list(range(place, sizes.world, sizes.stage))
        group = dist.new_group(ranks, timeout=timeout)
        own = group if rank in ranks else own
    assert own is not None
    return own
