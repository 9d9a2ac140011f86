"""Ranks of a loop without a Lightning Trainer -> groups that share packs, and each rank's part of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist
from torch import nn

from lightning_thd.alignment import Alignment, Layout
from lightning_thd.batch import THDBatch
from lightning_thd.data.trainer_link import model_alignment
from lightning_thd.parallel.context.layout import Communication
from lightning_thd.parallel.shard import shard_batch
from lightning_thd.strategies.dynamic import check_ways
from lightning_thd.strategies.guards import (
    refuse_other_attention,
    refuse_second_context_parallelism,
    refuse_unused_layout,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """Which packs a rank of a loop reads, and how it cuts its part of them.

    Attributes:
        rank: of this process among those that read different data.
        ranks: their number.
        data_group: one rank of each pack; None is the world.
        size: ranks that share a pack; 1 leaves batches whole.
        group: these ranks.
        layout: how a pack is cut.
        communication: what attention exchanges.
    """

    rank: int
    ranks: int
    data_group: dist.ProcessGroup | None = None
    size: int = 1
    group: dist.ProcessGroup | None = field(default=None, repr=False)
    layout: Layout = "dual_chunk"
    communication: Communication = "auto"

    @property
    def alignment(self) -> Alignment | None:
        """Return what lengths and totals must be multiples of; None asks for nothing."""
        return None if self.size == 1 else Alignment.for_(cp=self.size, layout=self.layout)

    def cut(self, batch: THDBatch) -> THDBatch:
        """Keep this rank's part of a pack that lies on its device."""
        if self.size == 1:
            return batch
        return shard_batch(batch, group=self.group, layout=self.layout, communication=self.communication)

    def check(self, batch: THDBatch) -> None:
        """Refuse a model that has run on a shard without an attention that sees the other ranks."""
        refuse_unused_layout(batch)


def share_packs(
    model: nn.Module,
    *,
    rank: int,
    ranks: int,
    data_group: dist.ProcessGroup | None,
    size: int,
    layout: Layout,
    communication: Communication,
) -> Shared:
    """Group neighbouring ranks to share packs by context parallelism; a collective of the world.

    Raises:
        TypeError: for a size that is no number of ranks.
        ValueError: for ranks that do not divide, a process mesh with other axes, a model in FP8.
        MisconfigurationException: for an attention that would see its own shard alone.
    """
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(
            f"context_parallel_size={size!r} is {type(size).__name__}; wanted a number of ranks. 'dynamic' "
            "needs THDDDPStrategy or THDModelParallelStrategy."
        )
    check_ways(layout, communication, None)
    if size < 1 or ranks % size:
        raise ValueError(
            f"context_parallel_size={size} does not divide the {ranks} ranks that read data. Start a "
            "multiple of it, or lower it."
        )
    if size == 1:
        return Shared(rank=rank, ranks=ranks, data_group=data_group)
    if ranks != dist.get_world_size():
        raise ValueError(
            f"context_parallel_size={size} where {ranks} of {dist.get_world_size()} processes read different "
            "data: other axes of the mesh share weights. Use THDModelParallelStrategy(context_parallel_size=,"
            " tensor_parallel_size=) under Lightning, or a mesh of data-parallel ranks alone."
        )
    if model_alignment(model) is not None:
        raise ValueError(
            f"context_parallel_size={size} with a model in FP8, whose packs are aligned for one rank. Use "
            "Lightning with FP8Precision, or context_parallel_size=1."
        )
    refuse_other_attention(model, size)
    refuse_second_context_parallelism(model, size)
    groups = ranks // size
    sharing = [[first * size + i for i in range(size)] for first in range(groups)]
    reading = [[first * size + i for first in range(groups)] for i in range(size)]
    group, _ = dist.new_subgroups_by_enumeration(sharing)  # type: ignore[no-untyped-call]
    data, _ = dist.new_subgroups_by_enumeration(reading)  # type: ignore[no-untyped-call]
    return Shared(
        rank=rank // size,
        ranks=groups,
        data_group=data,
        size=size,
        group=group,
        layout=layout,
        communication=communication,
    )
