"""A ``THDBatch`` or ``THDStep`` -> the part of it that one context-parallel rank holds, of the same class.

Legend: cp context-parallel ranks, T slots in a pack, N = T / cp slots of a shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_thd._checks import described, instance
from lightning_thd.alignment import Layout
from lightning_thd.batch.prefixes import SharedBoundaries
from lightning_thd.batch.thd_batch import THDBatch, THDStep, check_batch
from lightning_thd.boundaries import Boundaries
from lightning_thd.parallel.context.cut_prefixes import SharedLayout, SharedShardBoundaries
from lightning_thd.parallel.context.dynamic_step import DynamicStep
from lightning_thd.parallel.context.layout import Communication, ShardBoundaries, ShardLayout
from lightning_thd.parallel.context.traffic import Traffic
from lightning_thd.stats import SeqStats


def shard_batch(
    batch: THDBatch,
    *,
    group: dist.ProcessGroup | None,
    cp: int | None = None,
    rank: int | None = None,
    layout: Layout = "dual_chunk",
    communication: Communication = "auto",
) -> THDBatch:
    """Cut a pack and return this rank's part; ``cp`` and ``rank`` default to those of ``group``.

    ``input_ids``, ``targets`` and ``position_ids`` of the part have N slots, and ``boundaries`` are
    ``ShardBoundaries``. ``lengths``, ``padded_lengths`` and ``sequence_ids`` are the whole pack's. So is
    ``stats``, except in dynamic groups, where it is this rank's share. ``loss_scale`` is cp times the
    pack's, because the mean over ranks also divides by cp. ``cu_seqlens`` and ``cu_seqlens_padded`` raise.
    If sequences share prefixes, the part has the predictions of its slots, and the weights of all tokens.
    """
    options: dict[str, Any] = {"layout": layout, "communication": communication}
    return cut_batch(batch, Traffic(), group=group, cp=cp, rank=rank, **options)


def cut_batch(
    batch: THDBatch,
    traffic: Traffic,
    *,
    group: dist.ProcessGroup | None,
    cp: int | None = None,
    rank: int | None = None,
    layout: Layout,
    communication: Communication,
) -> THDBatch:
    """Do as ``shard_batch``; ``traffic`` counts what the layers of the part receive from other ranks."""
    check_batch(batch)
    is_group = hasattr(group, "size") and hasattr(group, "rank")
    needs_group = group is not None or cp is None or rank is None
    if needs_group and not is_group:
        raise TypeError(f"group is {described(group)}; wanted a process group, or cp= and rank=.")
    if cp is None or rank is None:
        assert group is not None
        cp = group.size()
        rank = group.rank()

    options: dict[str, Any] = {"layout": layout, "communication": communication}
    options |= {"cp": cp, "rank": rank, "group": group, "device": batch.input_ids.device}
    options["traffic"] = traffic
    if isinstance(batch.boundaries, SharedBoundaries):
        shared = SharedLayout(batch.boundaries, **options)
        shard_layout: ShardLayout = shared
        boundaries: Boundaries = SharedShardBoundaries.of_shared(shared)
    else:
        shard_layout = ShardLayout(batch.padded_lengths, **options)
        boundaries = ShardBoundaries.of(batch.boundaries, shard_layout)
    shard_layout.longest = batch.boundaries.longest
    shard_layout.sequences = len(batch.lengths)
    slots = shard_layout.own  # int64 [N], those of this rank
    traffic.count("slots", shard_layout.local_slots)

    weights = batch.weights
    if weights is not None and batch.prefixes is None:  # else of tokens, which every rank keeps
        weights = weights.index_select(-1, slots)

    def scaled(scale: float | None) -> float | None:
        return None if scale is None else scale * cp

    return batch.replace(
        input_ids=batch.input_ids.index_select(-1, slots),
        targets=None if batch.prefixes is not None else batch.targets.index_select(-1, slots),
        max_targets=batch.max_targets,
        position_ids=batch.position_ids.index_select(-1, slots),
        boundaries=boundaries,
        loss_scale=batch.loss_scale * cp,
        weights=weights,
        sequence_scale=scaled(batch.sequence_scale),
        token_scale=scaled(batch.token_scale),
        extras=_cut_extras(batch, slots),
    )


def shard_step(step: THDStep, **options: Any) -> THDStep:
    """Cut every microbatch of a step; ``options`` are those of ``shard_batch``."""
    instance(step, "step", THDStep, advice="Pass THDStep(microbatches).")
    return step.each(lambda batch: shard_batch(batch, **options))


def cut_step(
    step: DynamicStep,
    groups: Mapping[int, dist.ProcessGroup],
    *,
    traffic: Traffic | None = None,  # counts what layers receive; None counts those of this step
    **options: Any,
) -> THDStep:
    """Cut every microbatch of a step to this rank's part, which with degree 1 is the whole pack."""
    if traffic is None:
        traffic = Traffic()
    parts = []
    for batch, degree in zip(step.microbatches, step.degrees, strict=True):
        if degree > 1 and degree not in groups:
            raise ValueError(
                f"A plan shares a microbatch over {degree} ranks, but groups exist only of {sorted(groups)} "
                "ranks. Raise max_context_parallel_size, or plan with the sharing of the strategy."
            )

        if degree == 1:
            traffic.count("slots", batch.input_ids.shape[-1])
            parts.append(batch)
            continue

        shard = cut_batch(batch, traffic, group=groups[degree], **options)
        # Counts are summed over all ranks, so each rank of the group counts only its part of the pack.
        parts.append(shard.replace(stats=part_of(batch.stats, degree, groups[degree].rank())))

    return THDStep(parts)


def part_of(stats: SeqStats, parts: int, part: int) -> SeqStats:
    """Return one of ``parts`` parts of a pack's counts: whole numbers, larger by one in the first parts."""

    def share(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple((window, share(pairs)) for window, pairs in value)
        return value // parts + (part < value % parts)

    return SeqStats(**{field.name: share(getattr(stats, field.name)) for field in fields(SeqStats)})


def _cut_extras(batch: THDBatch, slots: Tensor) -> dict[str, Tensor]:
    """Keep some slots of extras ``[1, T, ...]``; refuse others, such as images."""
    num_slots = batch.input_ids.shape[-1]
    extras = {}
    for name, value in batch.extras.items():
        if value.shape[:2] != (1, num_slots):
            raise ValueError(
                f"A batch carries {name!r} of shape {tuple(value.shape)}, which context parallelism cannot "
                f"cut; wanted [1, {num_slots}, ...]. Leave it out, or set context_parallel_size=1."
            )
        extras[name] = value.index_select(1, slots)
    return extras
