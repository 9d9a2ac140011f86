"""A step whose microbatches are shared by different numbers of ranks (their degrees) -> one rank's parts.

Groups of 2, 4, 8, ... neighbouring ranks are created once. The c ranks of a group share a microbatch of
degree c: each has the whole pack until ``shard.cut_step``. With degree 1, one rank runs the whole pack.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_thd.batch.thd_batch import THDBatch, THDStep
from lightning_thd.parallel.across_ranks import digests, int63, require_same


class DynamicStep(THDStep):
    """All packs of one rank in a step, before they are cut, with the number of ranks that share each."""

    __slots__ = ("degrees", "plan_digest")

    degrees: tuple[int, ...]  # number of ranks that share each microbatch
    plan_digest: int  # hash of the degrees of all microbatches of all ranks; must be the same on every rank

    def __init__(self, microbatches: Sequence[THDBatch], degrees: Sequence[int], plan_digest: int) -> None:
        super().__init__(microbatches)
        self._set(degrees=tuple(map(int, degrees)), plan_digest=plan_digest)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("microbatches", "degrees", "plan_digest")}


def digest_of(degrees: Any) -> int:
    """Hash a table of degrees, int64 ``[ranks, microbatches]``, to an int63."""
    hashed = hashlib.sha256(repr(degrees.shape).encode() + degrees.astype("<i8").tobytes())
    return int63(hashed.digest())


def make_degree_groups(
    data_ranks: int, max_degree: int, *, tp: int, device: torch.device
) -> dict[int, dist.ProcessGroup]:
    """Create groups of 2, 4, ... data ranks; return this rank's by size. All ranks of the job call this."""
    groups: dict[int, dist.ProcessGroup] = {}
    for degree in (1 << i for i in range(1, max_degree.bit_length())):
        # Tensor-parallel ranks of one data rank are neighbours; each has groups with its like.
        ranks_of_groups: list[list[int]] = []
        for first in range(0, data_ranks, degree):
            members = range(first, first + degree)
            ranks_of_groups += [[rank * tp + tp_rank for rank in members] for tp_rank in range(tp)]

        group, _ = dist.new_subgroups_by_enumeration(ranks_of_groups)  # type: ignore[no-untyped-call]
        # NCCL needs all ranks in a group's first collective; the first exchange may be between only two.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        groups[degree] = group
    return groups


def check_dynamic_agreement(
    step: DynamicStep, groups: Mapping[int, dist.ProcessGroup], device: torch.device
) -> None:
    """Raise unless all ranks have the same plan, and the ranks of a group the same packs; a collective."""
    require_same(
        step.plan_digest,
        device,
        "Ranks were given different plans of a step, which hangs or changes the loss. Plan from the same "
        "lengths and seed on every rank, as THDDataModule does.",
    )

    for batch, degree in zip(step.microbatches, step.degrees, strict=True):
        if degree > 1:
            require_same(
                digests(batch)[0],
                device,
                f"{degree} ranks share one pack but read different ones. Use THDDataModule, or the same "
                "dataset on every rank.",
                groups[degree],
            )
