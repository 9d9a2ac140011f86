"""Gradients of tiles -> gradients of the head's operands.

R rows, H hidden size, V vocabulary columns held here, c x v one tile. Whichever loop is outside, the
operand it runs over is finished tile by tile; the other one is added to once an outer tile. All sums are
made in the accumulator's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_thd.loss.tiles.logits import Head
from lightning_thd.loss.tiles.products import accumulate
from lightning_thd.loss.tiles.wide_sum import WideSum


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadGradients:
    """Gradients of a head's operands; None for those that need none.

    Attributes:
        hidden: ``[R, H]``, in the accumulator's dtype, or its own with rows outside.
        weight: ``[V, H]``, in its own dtype.
        bias: ``[V]``, in the accumulator's dtype.
        low_rank: ``[R, r]`` and ``[V, r]``, likewise.
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    low_rank: tuple[Tensor | None, Tensor | None]


class GradientSums:
    """Accumulators of the operands' gradients, to which every tile adds.

    Args:
        head: the operands.
        needs: whether hidden, weight, bias and the LoRA need gradients.
        rows_outside: the loop over rows is the outer one.
    """

    def __init__(self, head: Head, *, needs: tuple[bool, bool, bool, bool], rows_outside: bool) -> None:
        self.head = head
        self.rows_outside = rows_outside
        rows, filled = head.hidden.shape[0], head.columns == head.weight.shape[0]
        device, wide = head.hidden.device, head.accumulator
        # Sums that every tile reaches are overwritten by the first of them; the others begin at zero.
        blank = torch.empty if head.columns else torch.zeros
        hidden_dtype = head.hidden.dtype if rows_outside else wide
        self.hidden = blank(head.hidden.shape, dtype=hidden_dtype, device=device) if needs[0] else None
        blank = torch.empty if rows and filled else torch.zeros
        self.weight: Tensor | None = None
        self._wide_weight: WideSum | None = None
        if needs[1] and rows_outside and rows and head.weight.dtype != wide:
            self._wide_weight = WideSum(head.weight, columns=head.columns, width=head.tile[1], wide=wide)
        elif needs[1]:
            self.weight = blank(head.weight.shape, dtype=head.weight.dtype, device=device)
        self.bias = torch.zeros(head.weight.shape[:1], dtype=wide, device=device) if needs[2] else None
        self.low: tuple[Tensor, Tensor] | None = None
        if needs[3] and head.low_rank is not None:
            first, second = (torch.zeros(part.shape, dtype=wide, device=device) for part in head.low_rank)
            self.low = (first, second)
        self._tile: Tensor | None = None
        # Without rows, or without columns on this rank, no product fills an accumulator.
        self._blank = torch.empty_like if rows and head.columns else torch.zeros_like

    def open(self, outer: slice) -> None:
        """Begin a tile of the outer loop, with a wide accumulator where its gradient is narrow."""
        total = self.hidden if self.rows_outside else self.weight
        if total is not None:
            tile = total[outer]
            narrow = tile.dtype != self.head.accumulator
            self._tile = self._blank(tile, dtype=self.head.accumulator) if narrow else tile

    def add(self, dx: Tensor, rows: slice, columns: slice) -> None:
        """Add the contribution of a tile, whose raw products have the gradient ``dx`` ``[c, v]``."""
        head = self.head
        if self.bias is not None:
            self.bias[columns] += dx.sum(0)
        if head.native:  # once for all products
            dx = dx.to(head.compute)
        if self.hidden is not None:
            total = self._tile if self.rows_outside else self.hidden[rows]
            assert total is not None
            accumulate(total, dx, head.weight[columns], head.compute, first=columns.start == 0)
        if self.weight is not None or self._wide_weight is not None:
            total = self._weight_tile(columns)
            accumulate(total, dx.t(), head.hidden_tile(rows), head.compute, first=rows.start == 0)
        if self.low is not None:
            x, w = head.low_rank_tile(rows, columns)
            accumulate(self.low[0][rows], dx, w, head.compute, first=False)
            accumulate(self.low[1][columns], dx.t(), x, head.compute, first=False)

    def _weight_tile(self, columns: slice) -> Tensor:
        if self._wide_weight is not None:
            return self._wide_weight.tile(columns)
        total = self.weight[columns] if self.rows_outside and self.weight is not None else self._tile
        assert total is not None
        return total

    def close(self, outer: slice) -> None:
        """Finish a tile of the outer loop and round its accumulator."""
        total = self.hidden if self.rows_outside else self.weight
        if total is not None and self._tile is not None and self._tile.dtype != total.dtype:
            total[outer] = self._tile

    def result(self) -> HeadGradients:
        """Return the accumulated gradients of the operands."""
        if self._wide_weight is not None:
            self.weight = self._wide_weight.result()
        low = (None, None) if self.low is None else self.low
        return HeadGradients(hidden=self.hidden, weight=self.weight, bias=self.bias, low_rank=low)
