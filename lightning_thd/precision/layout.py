"""A strategy -> how its ranks share a pack, and which of them share FP8 statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_thd.alignment import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """The parallel sizes and groups of a strategy that FP8 depends on.

    Attributes:
        cp: context-parallel ranks, the most there can be where they change with the batch.
        tp: tensor-parallel ranks.
        sequence_parallel: whether activations are cut along slots between tensor-parallel products.
        context_layout: how context parallelism cuts a pack.
        group: the ranks whose statistics are one: all that see tokens of the step; None for one rank.
    """

    cp: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    context_layout: Layout = "dual_chunk"
    group: Any = None


def layout_of(strategy: Any) -> ParallelLayout:
    """Return the layout of a strategy of ours, or of Lightning's whose ranks hold different packs."""
    cp = getattr(strategy, "context_parallel_size", 1)
    if not isinstance(cp, int):
        cp = int(getattr(strategy, "max_context_parallel_size", 1) or 1)
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return ParallelLayout(
        cp=cp,
        tp=int(getattr(strategy, "tensor_parallel_size", 1) or 1),
        sequence_parallel=bool(getattr(strategy, "sequence_parallel", False)),
        context_layout=getattr(strategy, "context_parallel_layout", "dual_chunk"),
        # data, context and tensor ranks together are the job: there is no axis of other layers in it
        group=dist.group.WORLD if several else None,
    )
