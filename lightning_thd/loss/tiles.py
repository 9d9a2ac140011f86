"""Hidden states x head weight, in tiles of tokens and vocabulary -> statistics of the softmax, and gradients.

R rows (tokens with a target), H hidden size, V vocabulary columns held here, c x v one tile. The vocabulary is the
outer loop: a tile of the weight is read once, widened once, and its gradient is finished before the next one.
Memory is two tiles; nothing of size R x V exists at any time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_thd.loss.logit_map import LogitMap
from lightning_thd.loss.products import accumulate, operand, product

# Columns of the statistics: largest logit m, sum e^(z-m), sum e^(z-m) (z-m), the target's z, sum z.
MAX, SUM, WEIGHTED, TARGET, TOTAL = range(5)


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """A language model's head and what goes into it.

    Attributes:
        hidden: ``[R, H]``.
        weight: ``[V, H]``, this rank's columns of the vocabulary.
        bias: ``[V]``.
        low_rank: a LoRA's ``(x [R, r], weight [V, r])``, added to the product.
        logit_map: what happens between the product and the softmax.
        columns: columns held here that exist; the rest pads the vocabulary.
        start: vocabulary index of the first column.
        compute: dtype of the products' inputs.
        accumulator: dtype of their sums.
        tile: rows and columns of a tile.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    low_rank: tuple[Tensor, Tensor] | None
    logit_map: LogitMap
    columns: int
    start: int
    compute: torch.dtype
    accumulator: torch.dtype
    tile: tuple[int, int]

    def row_tiles(self) -> Iterator[slice]:
        """Slices over R."""
        rows = self.hidden.shape[0]
        return (slice(i, min(i + self.tile[0], rows)) for i in range(0, rows, self.tile[0]))

    def column_tiles(self) -> Iterator[slice]:
        """Slices over the columns that exist."""
        return (slice(j, min(j + self.tile[1], self.columns)) for j in range(0, self.columns, self.tile[1]))

    def scratch(self) -> Tensor:
        """One flat buffer a tile fits in."""
        size = min(self.tile[0], self.hidden.shape[0]) * min(self.tile[1], self.columns)
        return self.hidden.new_empty(size, dtype=self.accumulator)

    def weight_tile(self, columns: slice) -> Tensor:
        """``[v, H]`` as a product takes it."""
        return operand(self.weight[columns], self.compute, self.accumulator)

    def logits(self, rows: slice, columns: slice, weight: Tensor, out: Tensor) -> Tensor:
        """Write the mapped logits of a tile over the front of the buffer ``out``; ``[c, v]``."""
        z = out[: (rows.stop - rows.start) * weight.shape[0]].view(-1, weight.shape[0])
        product(operand(self.hidden[rows], self.compute, self.accumulator), weight, out=z)
        return self.finish(z, rows, columns)

    def finish(self, z: Tensor, rows: slice, columns: slice) -> Tensor:
        """Turn a tile of raw products into mapped logits in place, ``[c, v]``."""
        if self.low_rank is not None:
            x, w = (
                operand(t, self.compute, self.accumulator).to(z.dtype)
                for t in self.low_rank_tile(rows, columns)
            )
            z.addmm_(x, w.t())
        if self.bias is not None:
            z.add_(self.bias[columns])
        return self.logit_map.apply_(z)

    def low_rank_tile(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """The LoRA's part of a tile, ``[c, r]`` and ``[v, r]``."""
        assert self.low_rank is not None
        return self.low_rank[0][rows], self.low_rank[1][columns]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGradients:
    """What the loss wants of each row, ``[R]`` each: the gradients of log-probability, entropy, lse and mean logit.

    With ``p`` the softmax, ``dz = p * (direct + slope * log p) + onehot * target + flat``.
    """

    direct: Tensor
    slope: Tensor | None
    target: Tensor
    flat: Tensor | None

    def at(self, rows: slice) -> RowGradients:
        """The same for some of the rows."""
        return RowGradients(
            direct=self.direct[rows],
            slope=None if self.slope is None else self.slope[rows],
            target=self.target[rows],
            flat=None if self.flat is None else self.flat[rows],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadGradients:
    """Gradients in the accumulator's dtype, the weight's in its own; None where nobody asked."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    low_rank: tuple[Tensor | None, Tensor | None]


def softmax_statistics(head: Head, targets: Tensor, *, entropy: bool, total: bool) -> Tensor:
    """Run over all tiles once and keep five numbers a row.

    Args:
        head: the operands.
        targets: int64 ``[R]``, vocabulary indices; rows of targets held elsewhere get TARGET 0.
        entropy: fill WEIGHTED.
        total: fill TOTAL.

    Returns:
        ``[5, R]`` in the accumulator's dtype, see ``MAX`` and following.
    """
    stats = head.hidden.new_zeros((5, head.hidden.shape[0]), dtype=head.accumulator)
    stats[MAX] = -torch.inf
    first, second = head.scratch(), head.scratch()
    for columns in head.column_tiles():
        weight = head.weight_tile(columns)
        for rows in head.row_tiles():
            z = head.logits(rows, columns, weight, first)
            e = second[: z.numel()].view_as(z)
            update_statistics(
                stats[:, rows], z, e, targets[rows] - head.start - columns.start, entropy, total
            )
    return stats


def update_statistics(
    stats: Tensor, z: Tensor, e: Tensor, targets: Tensor, entropy: bool, total: bool
) -> None:
    """Fold a tile ``z`` into the statistics ``[5, c]`` of its rows.

    Args:
        stats: changed in place.
        z: ``[c, v]``; destroyed when ``entropy`` is wanted.
        e: scratch ``[c, v]``.
        targets: int64 ``[c]``, counted from the tile's first column.
        entropy: fill WEIGHTED.
        total: fill TOTAL.
    """
    here, index = _targets_here(targets, z.shape[1])
    stats[TARGET] += torch.where(here, z.gather(1, index).squeeze(1), 0.0)
    if total:
        stats[TOTAL] += z.sum(1)
    largest = torch.maximum(stats[MAX], z.amax(1))
    shift = stats[MAX] - largest
    decay = shift.exp()
    if entropy:
        torch.exp(z.sub_(largest[:, None]), out=e)
        moved = torch.where(stats[SUM] > 0, stats[SUM] * shift, 0.0)  # 0 * -inf in the first tile
        stats[WEIGHTED] = decay * (stats[WEIGHTED] + moved) + z.mul_(e).sum(1)
    else:
        torch.sub(z, largest[:, None], out=e).exp_()
    stats[SUM] = decay * stats[SUM] + e.sum(1)
    stats[MAX] = largest


def _targets_here(targets: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Which rows have their target among ``columns``, ``[c]``, and an index that is safe for all, ``[c, 1]``."""
    here = (targets >= 0) & (targets < columns)
    return here, targets.clamp(0, columns - 1)[:, None]


def gradients(
    head: Head,
    targets: Tensor,
    lse: Tensor,
    wanted: RowGradients,
    *,
    needs: tuple[bool, bool, bool, bool],
) -> HeadGradients:
    """Make the logits again, tile by tile, and the gradients of what was asked for.

    Args:
        head: the operands of the forward pass.
        targets: int64 ``[R]``.
        lse: ``[R]``, over the whole vocabulary.
        wanted: the gradients of the outputs.
        needs: whether hidden, weight, bias and the LoRA need theirs.
    """
    zeros = head.hidden.new_zeros
    d_hidden = zeros(head.hidden.shape, dtype=head.accumulator) if needs[0] else None
    d_weight = torch.zeros_like(head.weight, memory_format=torch.contiguous_format) if needs[1] else None
    d_bias = zeros(head.weight.shape[:1], dtype=head.accumulator) if needs[2] else None
    d_low = None
    if needs[3] and head.low_rank is not None:
        d_low = (
            zeros(head.low_rank[0].shape, dtype=head.accumulator),
            zeros(head.low_rank[1].shape, dtype=head.accumulator),
        )
    first, second = head.scratch(), head.scratch()
    for columns in head.column_tiles():
        weight = head.weight_tile(columns)
        tile_dw = _tile_of(d_weight, columns, head.accumulator)
        for rows in head.row_tiles():
            z = head.logits(rows, columns, weight, first)
            e = second[: z.numel()].view_as(z)
            local = targets[rows] - head.start - columns.start
            dx = logit_gradient(head.logit_map, z, e, local, lse[rows], wanted.at(rows))
            if d_hidden is not None:
                accumulate(d_hidden[rows], dx, head.weight[columns], head.compute)
            if tile_dw is not None:
                accumulate(tile_dw, dx.t(), head.hidden[rows], head.compute)
            if d_bias is not None:
                d_bias[columns] += dx.sum(0)
            if d_low is not None:
                x, w = head.low_rank_tile(rows, columns)
                accumulate(d_low[0][rows], dx, w, head.compute)
                accumulate(d_low[1][columns], dx.t(), x, head.compute)
        if d_weight is not None and tile_dw is not None and tile_dw.dtype != d_weight.dtype:
            d_weight[columns] = tile_dw.to(d_weight.dtype)
    return HeadGradients(hidden=d_hidden, weight=d_weight, bias=d_bias, low_rank=d_low or (None, None))


def _tile_of(d_weight: Tensor | None, columns: slice, accumulator: torch.dtype) -> Tensor | None:
    """The rows of the weight's gradient to sum into: its own where wide enough, else a wide copy of zeros."""
    if d_weight is None:
        return None
    tile = d_weight[columns]
    return tile if tile.dtype == accumulator else torch.zeros_like(tile, dtype=accumulator)


def logit_gradient(
    logit_map: LogitMap, z: Tensor, e: Tensor, targets: Tensor, lse: Tensor, wanted: RowGradients
) -> Tensor:
    """Turn mapped logits ``z`` into the gradient of the raw product, in ``z`` or ``e`` (both destroyed).

    Args:
        logit_map: what was applied to the product.
        z: ``[c, v]``.
        e: scratch ``[c, v]``.
        targets: int64 ``[c]``, counted from the tile's first column.
        lse: ``[c]``.
        wanted: of these rows.
    """
    factor = logit_map.scale / logit_map.temperature
    direct = (wanted.direct * factor)[:, None]
    capped = logit_map.softcap is not None
    dz = torch.sub(z, lse[:, None], out=e) if capped else z.sub_(lse[:, None])
    if wanted.slope is None:
        dz.exp_().mul_(direct)
    else:
        p = dz.exp() if capped else torch.exp(dz, out=e)
        dz.mul_((wanted.slope * factor)[:, None]).add_(direct).mul_(p)
    if wanted.flat is not None:
        dz.add_((wanted.flat * factor)[:, None])
    here, index = _targets_here(targets, dz.shape[1])
    extra = torch.where(here, wanted.target * factor, 0.0)[:, None]
    dz.scatter_(1, index, dz.gather(1, index) + extra)
    if logit_map.softcap is not None:  # 1 - tanh^2, with tanh = z * temperature / cap
        dz.mul_(z.mul_(logit_map.temperature / logit_map.softcap).square_().neg_().add_(1.0))
    return dz
