"""A plan of shared microbatches -> one rank's step, each microbatch padded for the ranks that share it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_thd.packing.sharing import Sharing
from lightning_thd.packing.sharing.planner import SharedStepPlan
from lightning_thd.parallel.context.shared_step import SharedStep, digest_of

if TYPE_CHECKING:
    from lightning_thd.data.loader import BatchMaker


def make_shared_step(plan: SharedStepPlan, maker: BatchMaker, sharing: Sharing, rank: int) -> SharedStep:
    """Read and collate one rank's packs of a step; packs shared with other ranks are read whole.

    Returns:
        The step, with scales that make the mean over ranks and microbatches the step's. A pack counts on each
        of the c ranks that share it, so its scale is 1 / c of that of a pack of one rank.
    """
    scales = plan.scales()
    assert scales is not None, "a planner of training data knows its loss tokens"
    tokens, sequences = scales
    degrees = plan.degrees[rank].tolist()
    batches = [
        replace(maker, align=sharing.align(degree)).batch(
            spans, loss_scale=tokens / degree, sequence_scale=sequences / degree
        )
        for spans, degree in zip(plan.microbatches(rank), degrees, strict=True)
    ]
    return SharedStep(batches, degrees, digest_of(plan.degrees))
