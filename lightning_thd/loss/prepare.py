"""What the caller passes -> checked, flattened, selected rows, and how to give results their shape again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_thd.loss.checks import check_operands, check_rows, check_target_values, check_targets
from lightning_thd.loss.tiles.budget import tile_shape
from lightning_thd.loss.tiles.logit_map import LogitMap
from lightning_thd.loss.tiles.products import accumulator_dtype, has_autocast
from lightning_thd.loss.tiles.rows import rows_with_target
from lightning_thd.loss.tiles.vocab_parallel import GatherRows


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Everything about a call that is no tensor.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The rows that are multiplied.

    Attributes:
        hidden: ``[R, H]``, on the path of the gradient.
        low_rank: ``[R, r]``, likewise.
        targets: int64 ``[R]``.
        counts: bool ``[R]``, False where the target is ignored; None where all count.
        kept: int64 ``[R]``, where they stand in ``shape`` flattened; None for all.
        shape: what the caller wants back.
    """

    hidden: Tensor
    low_rank: Tensor | None
    targets: Tensor
    counts: Tensor | None
    kept: Tensor | None
    shape: torch.Size

    def restore(self, values: Tensor) -> Tensor:
        """Put results ``[R]`` in their places; zero, and without gradient, where the target is ignored."""
        if self.counts is not None:
            values = torch.where(self.counts, values, 0.0)
        if self.kept is None:
            return values.view(self.shape)
        return values.new_zeros(self.shape.numel()).index_copy(0, self.kept, values).view(self.shape)


def prepare(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None,
    logit_map: LogitMap,
    low_rank: tuple[Tensor, Tensor] | None,
    ignore_index: int,
    rows: Tensor | None,
    tp_group: dist.ProcessGroup | None,
    sequence_parallel: bool,
    partial_hidden: bool = False,
    chunk: int | Literal["auto"],
) -> tuple[Rows, Settings]:
    """Check the arguments of ``fused_linear_logprobs`` and bring them into one form."""
    autocast = has_autocast(hidden.device)
    check_operands(hidden, weight, bias, low_rank, autocast=autocast)
    if sequence_parallel and (tp_group is None or hidden.ndim != 2):
        raise ValueError(
            f"sequence_parallel=True came with tp_group={tp_group} and hidden {list(hidden.shape)}, "
            "wanted the "
            "group whose ranks hold the rows, and [T / P, H]."
        )
    ranks = 1 if tp_group is None else dist.get_world_size(tp_group)
    shape = hidden.shape[:-1] if not sequence_parallel else torch.Size([hidden.shape[0] * ranks])
    check_targets(targets, hidden, shape)
    x = None if low_rank is None else low_rank[0].flatten(0, -2)
    hidden = hidden.flatten(0, -2)
    if sequence_parallel:
        assert tp_group is not None
        hidden, x = _gathered(hidden, x, tp_group)
    settings = _settings(
        hidden, weight, logit_map, tp_group, sequence_parallel or partial_hidden, autocast, chunk
    )
    selected = _select(hidden, x, targets.long(), ignore_index, rows)
    check_target_values(selected.targets, ignore_index, settings.vocabulary)
    return selected, settings


def _gathered(hidden: Tensor, x: Tensor | None, group: dist.ProcessGroup) -> tuple[Tensor, Tensor | None]:
    if x is None:
        return GatherRows.apply(hidden, group), None  # type: ignore[no-untyped-call]
    both = GatherRows.apply(torch.cat([hidden, x], dim=1), group)  # type: ignore[no-untyped-call]
    return both[:, : hidden.shape[1]], both[:, hidden.shape[1] :]


def _settings(
    hidden: Tensor,
    weight: Tensor,
    logit_map: LogitMap,
    tp_group: dist.ProcessGroup | None,
    partial_hidden: bool,
    autocast: bool,
    chunk: int | Literal["auto"],
) -> Settings:
    shard = weight.shape[0]
    ranks, rank = (1, 0) if tp_group is None else (dist.get_world_size(tp_group), dist.get_rank(tp_group))
    start = rank * shard
    vocabulary = shard * ranks if logit_map.valid_vocab_size is None else logit_map.valid_vocab_size
    if vocabulary > shard * ranks:
        raise ValueError(
            f"valid_vocab_size is {vocabulary} but weight has {shard * ranks} rows over {ranks} "
            "rank(s), wanted "
            "at most that many. It counts the entries that exist among padded ones."
        )
    columns = max(0, min(shard, vocabulary - start))
    accumulator = accumulator_dtype(hidden, weight)
    compute = torch.get_autocast_dtype(hidden.device.type) if autocast else hidden.dtype
    if autocast and accumulator == torch.float64:
        compute = accumulator  # autocast leaves fp64 alone
    return Settings(
        logit_map=logit_map,
        vocabulary=vocabulary,
        columns=columns,
        start=start,
        compute=compute,
        accumulator=accumulator,
        tile=tile_shape(
            hidden.shape[0], columns, device=hidden.device, itemsize=accumulator.itemsize, chunk=chunk
        ),
        tp_group=tp_group,
        partial_hidden=partial_hidden,
    )


def _select(
    hidden: Tensor, x: Tensor | None, targets: Tensor, ignore_index: int, rows: Tensor | None
) -> Rows:
    shape, flat = targets.shape, targets.flatten()
    kept = None
    picked = None
    if rows is not None:
        picked = check_rows(rows, flat.numel(), hidden.device)
        shape, flat = picked.shape, flat[picked]
    else:
        kept = rows_with_target(flat, ignore_index)
        flat = flat if kept is None else flat[kept]
    picked = kept if picked is None else picked
    return Rows(
        hidden=hidden if picked is None else hidden.index_select(0, picked),
        low_rank=x if x is None or picked is None else x.index_select(0, picked),
        targets=flat,
        counts=None if kept is not None else flat != ignore_index,
        kept=kept,
        shape=shape,
    )
