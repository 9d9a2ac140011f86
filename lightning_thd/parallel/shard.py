"""A ``THDBatch`` -> the part of it that one context-parallel rank holds, a ``THDShard``.

Legend: cp context-parallel ranks, T slots in a pack, N = T / cp slots of a shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_thd._checks import described, instance
from lightning_thd.alignment import Layout
from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.batch.prefixes import SharedBatch
from lightning_thd.batch.thd_batch import check_batch, rows_of_slots, weighing_rows
from lightning_thd.parallel.context import traffic
from lightning_thd.parallel.context.layout import Communication, ShardLayout, offsets_of
from lightning_thd.parallel.context.partition import held_real_lengths
from lightning_thd.parallel.exchange import all_gather_rows, mapped, reduced

_BATCH_FIELDS = THDBatch.__slots__


class THDShard(THDBatch):
    """The slice of a pack that one context-parallel rank holds, in place of a ``THDBatch``.

    ``layout`` describes the slice. ``input_ids``, ``targets``, ``position_ids`` have N slots. ``cu_seqlens``
    and ``cu_seqlens_padded`` are offsets of this rank's parts of all sequences; the part of a sequence that
    only other ranks hold is empty. ``lengths``, ``padded_lengths`` and ``sequence_ids`` are the whole pack's.
    So is ``stats``, except in dynamic groups, where it is this rank's share. ``loss_scale`` is cp times the
    pack's, because the mean over ranks also divides by cp.
    """

    __slots__ = ("layout",)

    layout: ShardLayout

    @classmethod
    def _of(cls, batch: THDBatch, **fields: object) -> THDShard:
        shard = object.__new__(cls)
        shard.__setstate__({**batch.__getstate__(), **fields})
        return shard

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*_BATCH_FIELDS, "layout")}

    def __reduce__(self) -> Any:
        raise TypeError(
            "A THDShard belongs to a process group and cannot be pickled. Send the THDBatch and cut it there."
        )

    def replace(self, **changes: object) -> THDShard:
        """Return a copy with some fields changed."""
        if "targets" in changes:
            changes.setdefault("max_targets", None)
        return THDShard._of(self, **changes)

    def to(self, device: torch.device | str, *, non_blocking: bool | None = None) -> THDBatch:
        """Return the shard itself; refuse another device, because batches are moved before they are cut."""
        wanted, here = torch.device(device), self.layout.device  # without an index: the current device
        if wanted.type == here.type and (wanted.index == here.index or None in (wanted.index, here.index)):
            return self
        raise ValueError(
            f"A THDShard on {self.layout.device} cannot move to {device}. Move the THDBatch before it is cut."
        )

    def unpack(self, x: Tensor) -> list[Tensor]:
        """Gather ``[N, ...]`` or ``[1, N, ...]`` of all ranks and split it into sequences; a collective."""
        slots = self.layout.local_slots
        x = rows_of_slots(x, slots)
        if x.ndim == 0 or x.shape[0] != slots:
            raise ValueError(
                f"unpack() got a tensor of shape {tuple(x.shape)}, but the shard has {slots} slots. "
                f"Pass [{slots}, ...] or [1, {slots}, ...]."
            )
        return super().unpack(gather_pack(x, self.layout))

    def __iter__(self) -> Iterator[Tensor]:
        # Lightning weighs a logged loss by the rows of this tensor (see THDBatch.__iter__). All cp ranks give
        # the pack's weight, because the mean of their losses is the pack's loss.
        yield weighing_rows(self.layout.cp / self.loss_scale if self.loss_scale else 0.0)


def gather_pack(x: Tensor, layout: ShardLayout) -> Tensor:
    """Gather the shards ``[N, ...]`` of all ranks to ``[T, ...]`` in the pack's order; a collective."""
    assert layout.group is not None
    gathered = all_gather_rows(x, layout.group)
    return gathered if layout.restore is None else gathered.index_select(0, layout.restore)


def shard_batch(
    batch: THDBatch,
    *,
    group: dist.ProcessGroup | None,
    cp: int | None = None,
    rank: int | None = None,
    layout: Layout = "dual_chunk",
    communication: Communication = "auto",
) -> THDShard:
    """Cut a pack and return this rank's ``THDShard``; ``cp`` and ``rank`` default to those of ``group``."""
    check_batch(batch)
    if isinstance(batch, SharedBatch):
        raise ValueError(
            "Context parallelism cuts every sequence, but this batch has share_prefixes=True. Set "
            "context_parallel_size=1, or collate with share_prefixes=False."
        )
    known = cp is not None and rank is not None
    if not (known and group is None) and not (hasattr(group, "size") and hasattr(group, "rank")):
        raise TypeError(f"group is {described(group)}; wanted a process group, or cp= and rank=.")
    if cp is None or rank is None:
        assert group is not None
        cp, rank = group.size(), group.rank()
    shard_layout = ShardLayout(
        batch.padded_lengths,
        cp=cp,
        rank=rank,
        group=group,
        layout=layout,
        communication=communication,
        device=batch.input_ids.device,
    )
    shard_layout.longest = max(batch.padded_lengths[: len(batch.lengths)], default=1)
    shard_layout.sequences = len(batch.lengths)
    own = shard_layout.own
    traffic.count("slots", shard_layout.local_slots)
    real = held_real_lengths(batch.lengths, batch.padded_lengths, cp=cp, rank=rank, layout=layout)
    return THDShard._of(
        batch,
        input_ids=batch.input_ids.index_select(-1, own),
        targets=batch.targets.index_select(-1, own),
        position_ids=batch.position_ids.index_select(-1, own),
        cu_seqlens=shard_layout.put(offsets_of(real)),
        cu_seqlens_padded=shard_layout.offsets(),
        max_seqlen=max(1, int(shard_layout.held.max(initial=1))),
        loss_scale=batch.loss_scale * cp,
        weights=None if batch.weights is None else batch.weights.index_select(-1, own),
        sequence_scale=None if batch.sequence_scale is None else batch.sequence_scale * cp,
        token_scale=None if batch.token_scale is None else batch.token_scale * cp,
        extras=_cut_extras(batch, own),
        layout=shard_layout,
    )


def pack_value(loss: Tensor, batch: THDBatch) -> Tensor:
    """Return a loss with the value of the whole pack, for logs, and the gradient of this rank's shard."""
    if not isinstance(batch, THDShard) or (group := batch.layout.group) is None:
        return loss
    return mapped(loss, lambda own: reduced(own, group) / group.size(), lambda gradient: gradient)


def shard_step(step: THDStep, **options: Any) -> THDStep:
    """Cut every microbatch of a step; ``options`` are those of ``shard_batch``."""
    instance(step, "step", THDStep, advice="Pass THDStep(microbatches).")
    return THDStep([shard_batch(batch, **options) for batch in step.microbatches])


def _cut_extras(batch: THDBatch, own: Tensor) -> dict[str, Tensor]:
    slots = batch.input_ids.shape[-1]
    extras = {}
    for name, value in batch.extras.items():
        if value.shape[:2] != (1, slots):
            raise ValueError(
                f"A batch carries {name!r} of shape {tuple(value.shape)}, which context parallelism cannot "
                f"cut; wanted [1, {slots}, ...]. Leave it out, or set context_parallel_size=1."
            )
        extras[name] = value.index_select(1, own)
    return extras
