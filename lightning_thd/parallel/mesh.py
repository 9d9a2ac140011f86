"""Sizes of the axes and the number of processes -> the mesh of ranks, context inside data, tensor innermost.

Ranks of one tensor-parallel group are neighbours, as they talk most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DATA, CONTEXT, TENSOR = AXES = ("data_parallel", "context_parallel", "tensor_parallel")
DATA_CONTEXT = "data_context_parallel"


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisSizes:
    """Ranks along each axis.

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
        """Processes of the job."""
        return self.data * self.peers

    @property
    def peers(self) -> int:
        """Ranks that work on the same data."""
        return self.context * self.tensor

    def data_rank(self, rank: int) -> int:
        """Say which data a global rank reads: ``AxisSizes(data=2, context=2)`` has ranks 0 and 1 read 0."""
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


def make_mesh(sizes: AxisSizes, device_type: str) -> DeviceMesh:
    """Build the mesh and its process groups; a collective over the whole job.

    Returns:
        A mesh with the axes ``data_parallel``, ``context_parallel`` and ``tensor_parallel``, and the first
        two flattened as ``data_context_parallel``.
    """
    mesh = init_device_mesh(device_type, (sizes.data, sizes.context, sizes.tensor), mesh_dim_names=AXES)
    mesh[DATA, CONTEXT]._flatten(DATA_CONTEXT)
    mesh[CONTEXT, TENSOR]._flatten("peers")
    return mesh


def axis_group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup:
    """The process group of this rank along an axis."""
    group: dist.ProcessGroup = mesh[axis].get_group()
    return group
