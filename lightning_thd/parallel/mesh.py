"""Sizes of the axes and the number of processes -> the mesh of ranks, context inside data, tensor innermost.

Ranks of one tensor-parallel group are neighbours, as they talk most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DATA, CONTEXT, TENSOR = AXES = ("data_parallel", "context_parallel", "tensor_parallel")


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisSizes:
    """Holds the number of ranks along each parallel axis.

    Attributes:
        data: groups that read different data.
        context: ranks that share the slots of a pack.
        tensor: ranks that share the rows and columns of weights.
    """

    data: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def world(self) -> int:
        """Return the number of processes of the job."""
        return self.data * self.peers

    @property
    def peers(self) -> int:
        """Return the number of ranks that work on the same data."""
        return self.context * self.tensor

    def data_rank(self, rank: int) -> int:
        """Return which data a rank reads: under ``AxisSizes(data=2, context=2)`` ranks 0 and 1 read 0."""
        return rank // self.peers


def resolve_sizes(
    world: int, *, data: int | Literal["auto"] = "auto", context: int = 1, tensor: int = 1
) -> AxisSizes:
    """Check sizes against the number of processes; ``data="auto"`` takes what the others leave.

    Raises:
        ValueError: when they do not make up the job.
    """
    for name, size in (("context", context), ("tensor", tensor), ("data", 1 if data == "auto" else data)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(
                f"{name}_parallel_size={size!r}; wanted 1 or more ranks"
                + (" or 'auto'." if name == "data" else ", where 1 means not at all.")
            )
    if data == "auto":
        if world % (context * tensor):
            raise ValueError(
                f"context_parallel_size={context} x tensor_parallel_size={tensor} does not divide the "
                f"{world} processes of the job. Start a multiple of {context * tensor} processes, or lower "
                "a size."
            )
        data = world // (context * tensor)
    sizes = AxisSizes(data=data, context=context, tensor=tensor)
    if sizes.world != world:
        raise ValueError(
            f"data_parallel_size={data} x context_parallel_size={context} x tensor_parallel_size={tensor} is "
            f"{sizes.world}, but the job has {world} processes. Start {sizes.world} processes, or use "
            "data_parallel_size='auto'."
        )
    return sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Meshes:
    """Holds the mesh of a job and the flattened meshes made of its axes.

    Attributes:
        axes: ``data_parallel`` x ``context_parallel`` x ``tensor_parallel``.
        data_context: the first two as one axis: ranks that see different tokens.
        peers: the last two as one axis: ranks that read the same data.
    """

    axes: DeviceMesh
    data_context: DeviceMesh
    peers: DeviceMesh

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the process group of this rank along one of the three axes."""
        group: dist.ProcessGroup = self.axes.get_group(axis)
        return group


def make_meshes(sizes: AxisSizes, device_type: str) -> Meshes:
    """Build the mesh and its process groups; a collective over the whole job."""
    mesh = init_device_mesh(device_type, (sizes.data, sizes.context, sizes.tensor), mesh_dim_names=AXES)
    return Meshes(
        axes=mesh,
        data_context=mesh[DATA, CONTEXT]._flatten("data_context_parallel"),
        peers=mesh[CONTEXT, TENSOR]._flatten("peers"),
    )
