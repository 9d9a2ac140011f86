"""A language model's head and its inputs -> the logits of one tile.

R rows (tokens with a target), H hidden size, V vocabulary columns held here, c x v one tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_thd.loss.tiles.logit_map import LogitMap
from lightning_thd.loss.tiles.products import is_native, operand, product, rounded_product


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """A language model's head with its inputs and tile size.

    Attributes:
        hidden: ``[R, H]``.
        weight: ``[V, H]``, this rank's columns of the vocabulary.
        bias: ``[V]``.
        low_rank: a LoRA's ``(x [R, r], weight [V, r])``, added to the product.
        counts: bool ``[R]``, False for rows to be taken as zeros, whatever they hold; None for none.
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
    counts: Tensor | None
    logit_map: LogitMap
    columns: int
    start: int
    compute: torch.dtype
    accumulator: torch.dtype
    tile: tuple[int, int]

    def row_tiles(self) -> Iterator[slice]:
        """Iterate over tiles of rows, as slices."""
        rows = self.hidden.shape[0]
        return (slice(i, min(i + self.tile[0], rows)) for i in range(0, rows, self.tile[0]))

    def column_tiles(self) -> Iterator[slice]:
        """Iterate over tiles of the columns that exist, as slices."""
        return (slice(j, min(j + self.tile[1], self.columns)) for j in range(0, self.columns, self.tile[1]))

    def scratch(self, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate one flat buffer that holds a tile, in the accumulator's dtype or another."""
        size = min(self.tile[0], self.hidden.shape[0]) * min(self.tile[1], self.columns)
        return self.hidden.new_empty(size, dtype=dtype or self.accumulator)

    def hidden_tile(self, rows: slice | Tensor) -> Tensor:
        """Return hidden states ``[c, H]``, zeros in ignored rows: a NaN times zero is a NaN."""
        return self._counted(self.hidden, rows)

    def _counted(self, x: Tensor, rows: slice | Tensor) -> Tensor:
        return x[rows] if self.counts is None else torch.where(self.counts[rows, None], x[rows], 0.0)

    def weight_tile(self, columns: slice) -> Tensor:
        """Return rows of the weight ``[v, H]``, cast for a product."""
        return operand(self.weight[columns], self.compute, self.accumulator)

    def logits(self, rows: slice | Tensor, columns: slice, weight: Tensor, out: Tensor) -> Tensor:
        """Compute the mapped logits ``[c, v]`` of a tile in the front of the buffer ``out``."""
        x = self.hidden_tile(rows)
        z = out[: x.shape[0] * weight.shape[0]].view(-1, weight.shape[0])
        product(operand(x, self.compute, self.accumulator), weight, out=z)
        return self.finish(z, rows, columns)

    @property
    def native(self) -> bool:
        """Return whether the CPU's bf16 instructions make the products, with gradients rounded to bf16."""
        return is_native(self.compute, self.hidden.device)

    def rounded_logits(
        self, rows: slice, columns: slice, weight: Tensor, kept: Tensor, out: Tensor
    ) -> Tensor:
        """Compute logits from products rounded to bf16, which are kept in the buffer ``kept``."""
        shape = (rows.stop - rows.start, weight.shape[0])
        kept, z = (buffer[: shape[0] * shape[1]].view(shape) for buffer in (kept, out))
        return self.finish(
            rounded_product(self.hidden_tile(rows).to(self.compute), weight, kept=kept, out=z), rows, columns
        )

    def wide_logits(self, rows: slice | Tensor, columns: slice, weight: Tensor, out: Tensor) -> Tensor:
        """Compute logits as ``logits``, multiplied in the accumulator's dtype, whichever rows are beside."""
        x, w = (part.to(self.compute).to(self.accumulator) for part in (self.hidden_tile(rows), weight))
        z = product(x, w, out=out[: len(x) * len(w)].view(len(x), len(w)))
        return self.finish(z, rows, columns)

    def mixed_logits(
        self, rows: slice, columns: slice, weight: Tensor, kept: Tensor, out: Tensor, exact: Tensor
    ) -> Tensor:
        """Compute logits as ``rounded_logits``, and exactly in rows with ``exact`` ``[R]`` True."""
        chosen = exact[rows].nonzero().squeeze(1)
        if 2 * len(chosen) > rows.stop - rows.start:
            return self.wide_logits(rows, columns, weight, out)
        z = self.rounded_logits(rows, columns, weight, kept, out)
        if len(chosen):
            wide = z.new_empty(len(chosen) * weight.shape[0])
            z[chosen] = self.wide_logits(chosen + rows.start, columns, weight, wide)
        return z

    def finish(self, z: Tensor, rows: slice | Tensor, columns: slice) -> Tensor:
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

    def low_rank_tile(self, rows: slice | Tensor, columns: slice) -> tuple[Tensor, Tensor]:
        """Return the LoRA's operands of a tile, ``[c, r]`` and ``[v, r]``."""
        assert self.low_rank is not None
        return self._counted(self.low_rank[0], rows), self.low_rank[1][columns]
