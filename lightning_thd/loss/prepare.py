"""Arguments of a fused loss -> checked, flattened, selected rows, and how results get their shape again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_thd.loss.checks import (
    check_call,
    check_operands,
    check_rows,
    check_target_values,
    check_targets,
)
from lightning_thd.loss.dtensors import group_of_operands, is_dtensor, local_hidden, plain
from lightning_thd.loss.tiles.budget import tile_shape
from lightning_thd.loss.tiles.logit_map import LogitMap
from lightning_thd.loss.tiles.logits import Head
from lightning_thd.loss.tiles.products import accumulator_dtype, has_autocast
from lightning_thd.loss.tiles.rows import rows_with_target
from lightning_thd.parallel.exchange import all_gather_rows

Operands = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """The arguments common to all fused losses, described at ``fused_linear_logprobs``.

    ``logit_map`` holds temperature, cap, scale and valid columns. ``partial_hidden`` leaves the gradient of
    ``hidden`` a partial sum over ``tp_group``.
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    bias: Tensor | None = None
    logit_map: LogitMap = LogitMap()  # noqa: RUF009 (frozen)
    low_rank: tuple[Tensor, Tensor] | None = None
    ignore_index: int = -100
    rows: Tensor | None = None
    tp_group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False
    partial_hidden: bool = False
    chunk: int | Literal["auto"] = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of a call: dtypes, tile size, vocabulary and group.

    Attributes:
        logit_map: between product and softmax.
        vocabulary: columns that exist, over all ranks.
        columns: columns that exist on this rank.
        start: vocabulary index of this rank's first column.
        compute: dtype of the products' inputs.
        accumulator: dtype of their sums and of the results.
        tile: tokens and columns of a tile.
        tp_group: ranks that share the vocabulary.
        partial_hidden: the gradient of hidden is left for the caller to reduce over ``tp_group``.
        ignore_index: marks rows that do not count; None where all do.
    """

    logit_map: LogitMap
    vocabulary: int
    columns: int
    start: int
    compute: torch.dtype
    accumulator: torch.dtype
    tile: tuple[int, int]
    tp_group: dist.ProcessGroup | None
    partial_hidden: bool
    ignore_index: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Checked operands and targets of the rows that are multiplied.

    Attributes:
        operands: hidden ``[R, H]``, weight, bias, and a LoRA's ``[R, r]`` and ``[V, r]``, on the path of
            the gradient.
        targets: int64 ``[R]``.
        counts: bool ``[R]``, False where the target is ignored; None where all count.
        kept: int64 ``[R]``, where they stand in ``shape`` flattened; None for all.
        shape: what the caller wants back.
        settings: the rest.
    """

    operands: Operands
    targets: Tensor
    counts: Tensor | None
    kept: Tensor | None
    shape: torch.Size
    settings: Settings

    def restore(self, values: Tensor) -> Tensor:
        """Scatter results ``[R, ...]`` to the caller's shape, zeros where the target is ignored."""
        rest = values.shape[1:]
        if self.counts is not None:
            counts = self.counts.view(-1, *[1] * len(rest))
            values = torch.where(counts, values, values.new_zeros(()))
        if self.kept is None:
            return values.view(*self.shape, *rest)
        whole = values.new_zeros(self.shape.numel(), *rest).index_copy(0, self.kept, values)
        return whole.view(*self.shape, *rest)


def make_head(operands: Operands, targets: Tensor, settings: Settings) -> Head:
    """Build the ``Head`` that the tile loops take from prepared operands."""
    hidden, weight, bias, low_x, low_weight = operands
    ignored = settings.ignore_index
    return Head(
        hidden=hidden,
        weight=weight,
        bias=bias,
        low_rank=None if low_x is None or low_weight is None else (low_x, low_weight),
        counts=None if ignored is None else targets != ignored,
        logit_map=settings.logit_map,
        columns=settings.columns,
        start=settings.start,
        compute=settings.compute,
        accumulator=settings.accumulator,
        tile=settings.tile,
    )


def prepare(call: Call) -> Prepared:
    """Check the arguments of a fused loss, flatten them and select the rows to multiply."""
    check_call(call)
    call = _local(call)
    hidden, weight, group = call.hidden, call.weight, call.tp_group
    autocast = has_autocast(hidden.device)
    check_operands(hidden, weight, call.bias, call.low_rank, autocast=autocast)
    if call.sequence_parallel and (group is None or hidden.ndim != 2):
        raise ValueError(
            f"sequence_parallel=True came with tp_group={group} and hidden {list(hidden.shape)}, "
            "wanted the group whose ranks hold the rows, and [T / P, H]."
        )
    ranks = 1 if group is None else dist.get_world_size(group)
    shape = hidden.shape[:-1] if not call.sequence_parallel else torch.Size([hidden.shape[0] * ranks])
    check_targets(call.targets, hidden, shape)
    x = None if call.low_rank is None else call.low_rank[0].flatten(0, -2)
    hidden = hidden.flatten(0, -2)
    if call.sequence_parallel:
        assert group is not None
        hidden, x = _gathered(hidden, x, group)
    selected = _select(call, hidden, x, _settings(call, hidden, autocast))
    check_target_values(selected.targets, call.ignore_index, selected.settings.vocabulary)
    return selected


def _local(call: Call) -> Call:
    """Replace DTensors by this rank's part of them."""
    if not any(is_dtensor(x) for x in (call.hidden, call.weight, call.bias, call.targets)):
        return call
    hidden, group, partial = call.hidden, call.tp_group, call.partial_hidden
    if is_dtensor(call.weight):
        group = group_of_operands(hidden, call.weight, group)
    if is_dtensor(hidden):
        hidden, partial = local_hidden(hidden, group, call.low_rank is None)
    return replace(
        call,
        hidden=hidden,
        weight=plain(call.weight),
        bias=None if call.bias is None else plain(call.bias),
        targets=plain(call.targets),
        tp_group=group,
        partial_hidden=partial,
    )


def _gathered(hidden: Tensor, x: Tensor | None, group: dist.ProcessGroup) -> tuple[Tensor, Tensor | None]:
    if x is None:
        return all_gather_rows(hidden, group), None
    both = all_gather_rows(torch.cat([hidden, x], dim=1), group)
    return both[:, : hidden.shape[1]], both[:, hidden.shape[1] :]


def _settings(call: Call, hidden: Tensor, autocast: bool) -> Settings:
    group, shard = call.tp_group, call.weight.shape[0]
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    start = rank * shard
    valid = call.logit_map.valid_vocab_size
    vocabulary = shard * ranks if valid is None else valid
    if vocabulary > shard * ranks:
        raise ValueError(
            f"valid_vocab_size is {vocabulary} but weight has {shard * ranks} rows over {ranks} "
            "rank(s), wanted at most that many. It counts the entries that exist among padded ones."
        )
    columns = max(0, min(shard, vocabulary - start))
    accumulator = accumulator_dtype(hidden, call.weight)
    compute = torch.get_autocast_dtype(hidden.device.type) if autocast else hidden.dtype
    if autocast and accumulator == torch.float64:
        compute = accumulator  # autocast leaves fp64 alone
    itemsize = accumulator.itemsize
    return Settings(
        logit_map=call.logit_map,
        vocabulary=vocabulary,
        columns=columns,
        start=start,
        compute=compute,
        accumulator=accumulator,
        tile=tile_shape(hidden.shape[0], columns, device=hidden.device, itemsize=itemsize, chunk=call.chunk),
        tp_group=group,
        partial_hidden=call.sequence_parallel or call.partial_hidden,
    )


def _select(call: Call, hidden: Tensor, x: Tensor | None, settings: Settings) -> Prepared:
    targets = call.targets.long()
    shape, flat = targets.shape, targets.flatten()
    kept: Tensor | None = None
    picked: Tensor | None = None
    all_count = False
    if call.rows is not None:
        picked = check_rows(call.rows, flat.numel(), hidden.device)
        shape = picked.shape
    else:
        kept, all_count = rows_with_target(flat, call.ignore_index)
        picked = kept
    if picked is not None:
        flat, hidden = flat[picked], hidden.index_select(0, picked)
        x = None if x is None else x.index_select(0, picked)
    low_weight = None if call.low_rank is None else call.low_rank[1]
    counts = None if all_count else flat != call.ignore_index
    return Prepared(
        operands=(hidden, call.weight, call.bias, x, low_weight),
        targets=flat,
        counts=counts,
        kept=kept,
        shape=shape,
        settings=replace(settings, ignore_index=None if counts is None else call.ignore_index),
    )
