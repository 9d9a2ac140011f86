"""A language model's head and its inputs -> the logits of one tile, and gradients of tiles -> their sums.

R rows (selected tokens), H hidden size, V vocabulary columns held here, c x v one tile.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_thd._checks import real_number, whole_number
from lightning_thd._imports import installed
from lightning_thd.loss.tiles.products import accumulate, operand, product

# Bytes of the two scratch tiles. CPU: two 8 MiB tiles stay in a last-level cache and keep the multiplier
# at full speed. Measured: 1024 x 2048 is within 3 % of one large product. Accelerators: fp32 logits of 32k
# tokens x 152k vocabulary are 74 times 256 MiB, and two tiles of 128 MiB still keep a device busy.
_CPU_BYTES = 16 * 2**20
_ACCELERATOR_BYTES = 256 * 2**20
# The most columns of a tile.
_CPU_COLUMNS = 2048
_ACCELERATOR_COLUMNS = 8192
# Hidden ``[R, H]``, weight ``[V, H]`` and bias ``[V]``.
Operands = tuple[Tensor, Tensor, Tensor | None]
# Whether each operand needs a gradient.
Needs = tuple[bool, bool, bool]


@dataclass(frozen=True, slots=True)
class LogitMap:
    """The map ``z = cap * tanh(scale * x / cap) / temperature``; uncapped ``scale * x / temperature``."""

    scale: float = 1.0  # factor before the cap; granite's 1 / ``logits_scaling``, cohere's ``logit_scale``
    softcap: float | None = None  # the cap, in logits; None for no cap. Gemma 2 has 30
    temperature: float = 1.0  # divides the capped logits
    valid_vocab_size: int | None = None  # number of real columns of the vocabulary; None for all

    def __post_init__(self) -> None:
        if not real_number(self.scale, "scale"):
            raise ValueError("scale is 0, wanted another number. Leave it out for no scaling.")
        real_number(self.temperature, "temperature", above=0.0, advice="Greedy decoding is argmax.")
        if self.softcap is not None:
            real_number(self.softcap, "softcap", above=0.0, advice="Leave it out for no cap.")
        if self.valid_vocab_size is not None:
            whole_number(self.valid_vocab_size, "valid_vocab_size", least=1)

    def numbers(self) -> tuple[float, float | None, float]:
        """Return scale, cap and temperature, as the kernels take them."""
        softcap = None if self.softcap is None else float(self.softcap)
        return float(self.scale), softcap, float(self.temperature)

    def agrees(self, other: LogitMap) -> bool:
        """Return whether two maps give the same logits, up to the rounding of their factors."""
        return (
            math.isclose(self.scale, other.scale, rel_tol=1e-9)
            and math.isclose(self.softcap or 0.0, other.softcap or 0.0, rel_tol=1e-9)
            and math.isclose(self.temperature, other.temperature, rel_tol=1e-9)
            and self.valid_vocab_size == other.valid_vocab_size
        )

    def apply_(self, x: Tensor) -> Tensor:
        """Map a tile of raw products in place, ``[c, v]`` fp32 or fp64."""
        if self.softcap is None:
            factor = self.scale / self.temperature
            return x if factor == 1.0 else x.mul_(factor)
        return x.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of a fused loss, which its forward and backward pass share."""

    logit_map: LogitMap  # the map from products to logits
    vocabulary: int  # real columns, over all ranks
    columns: int  # real columns on this rank; the others pad the vocabulary
    start: int  # vocabulary index of this rank's first column
    compute: torch.dtype  # dtype of the products' inputs
    accumulator: torch.dtype  # dtype of the products and of the results
    native: bool  # whether the CPU's bf16 instructions multiply; then gradients are rounded to bf16
    chunk: int | Literal["auto"]  # tokens of a tile, as the user gave them
    tp_group: dist.ProcessGroup | None  # ranks that share the vocabulary
    partial_hidden: bool  # whether DTensor, not the loss, sums the gradient of hidden over ``tp_group``
    ignore_index: int | None = None  # the target of rows that do not count; None if all rows count
    of_logits: bool = False  # whether the hidden states are logits already, and the weight is empty


class Head:
    """A head with its inputs, its settings, and tiles of rows and of real columns."""

    def __init__(
        self, operands: Operands, targets: Tensor, settings: Settings, tile: tuple[int, int]
    ) -> None:
        self.hidden, self.weight, self.bias = operands
        # Bool ``[R]``. Hidden states of rows that are False are replaced by zeros; None if all rows count.
        self.counts = None if settings.ignore_index is None else targets != settings.ignore_index
        self.settings = settings
        self.tile = tile
        rows = self.hidden.shape[0]
        columns = settings.columns
        self.row_tiles = [slice(i, min(i + tile[0], rows)) for i in range(0, rows, tile[0])]
        self.column_tiles = [slice(i, min(i + tile[1], columns)) for i in range(0, columns, tile[1])]

    @classmethod
    def of(cls, operands: Operands, targets: Tensor, settings: Settings, *, chunk: int | None = None) -> Head:
        """Make a head of whose tiles two fit the budget of its device; ``chunk`` overrides the settings."""
        hidden = operands[0]
        rows = hidden.shape[0]
        if hidden.device.type == "cpu":
            tile_bytes = _CPU_BYTES
            widest = _CPU_COLUMNS
        else:
            tile_bytes = _ACCELERATOR_BYTES
            widest = _ACCELERATOR_COLUMNS

        elements = tile_bytes // (2 * settings.accumulator.itemsize)
        tokens = chunk or settings.chunk
        if tokens == "auto":
            columns = max(1, min(settings.columns, widest))
            tokens = elements // columns
        else:
            columns = max(1, min(settings.columns, max(widest, elements // tokens)))
        return cls(operands, targets, settings, (max(1, min(rows, tokens)), columns))

    def cut(self, rows: int, column_tiles: list[slice]) -> Head:
        """Return the same head with tiles of ``rows`` rows and with these tiles of columns."""
        head = copy(self)
        count = self.hidden.shape[0]
        head.tile = (rows, column_tiles[0].stop - column_tiles[0].start)
        head.row_tiles = [slice(i, min(i + rows, count)) for i in range(0, count, rows)]
        head.column_tiles = column_tiles
        return head

    def scratch(self, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate one flat buffer that holds a tile, in the accumulator's dtype or another."""
        size = min(self.tile[0], self.hidden.shape[0]) * min(self.tile[1], self.settings.columns)
        return self.hidden.new_empty(size, dtype=dtype or self.settings.accumulator)

    def counted(self, x: Tensor, rows: slice | Tensor) -> Tensor:
        """Select rows ``[c, ...]``, with zeros in rows that do not count: a NaN times zero is a NaN."""
        if self.counts is None:
            return x[rows]
        return torch.where(self.counts[rows, None], x[rows], 0.0)

    def inputs(self, rows: slice | Tensor) -> Tensor:
        """Return hidden states ``[c, H]``, cast for a product."""
        tile = self.hidden[rows] if self.counts is None else self.counted(self.hidden, rows)
        if tile.dtype == self.settings.compute == self.settings.accumulator:
            return tile
        return operand(tile, self.settings.compute, self.settings.accumulator)

    def weights(self, columns: slice) -> Tensor:
        """Return rows of the weight ``[v, H]``, cast for a product."""
        tile = self.weight[columns]
        if tile.dtype == self.settings.compute == self.settings.accumulator:
            return tile
        return operand(tile, self.settings.compute, self.settings.accumulator)

    def plain_bias(self, columns: slice) -> Tensor | None:
        """Return the bias of some columns, which autograd does not follow."""
        return None if self.bias is None else self.bias.detach()[columns]

    def logits(self, x: Tensor, w: Tensor, columns: slice, out: Tensor) -> Tensor:
        """Compute a tile's logits ``[c, v]`` from ``inputs`` and ``weights``, at the start of ``out``."""
        z = out[: x.shape[0] * w.shape[0]].view(-1, w.shape[0])
        return self.finish(product(x, w, out=z), columns)

    def rounded_logits(self, x: Tensor, w: Tensor, columns: slice, kept: Tensor, out: Tensor) -> Tensor:
        """Compute logits from products rounded to bf16, which stay in the buffer ``kept``."""
        z = out[: x.shape[0] * w.shape[0]].view(-1, w.shape[0])
        kept = kept[: z.numel()].view_as(z)
        return self.finish(z.copy_(torch.mm(x, w.t(), out=kept)), columns)

    def finish(self, z: Tensor, columns: slice) -> Tensor:
        """Turn a tile of raw products into mapped logits in place, ``[c, v]``."""
        if self.bias is not None:
            z.add_(self.bias[columns])
        return self.settings.logit_map.apply_(z)


def by_kernels(head: Head) -> bool:
    """Return whether the kernels of ``loss/kernels`` compute the rows of a head, or torch's operators do.

    Half precision stays with torch's operators, because gradients in fp16 are scaled by their largest
    element first. So does fp64, because the kernels compute in fp32.
    """
    settings = head.settings
    wide = settings.accumulator == torch.float32 and settings.compute in (torch.float32, torch.bfloat16)
    return wide and settings.columns > 0 and runs_triton(head.hidden.device)


def runs_triton(device: torch.device) -> bool:
    """Return whether Triton's kernels run on a device; on AMD's they were never tried."""
    return device.type == "cuda" and torch.version.hip is None and _has_triton()


@cache
def _has_triton() -> bool:
    return installed("triton")


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadGradients:
    """Gradients of a head's operands; None for an operand that needs none."""

    hidden: Tensor | None  # ``[R, H]``, in its own dtype if rows are the outer loop, else the accumulator's
    weight: Tensor | None  # ``[V, H]``, in its own dtype
    bias: Tensor | None  # ``[V]``, in the accumulator's dtype

    def like(self, operands: Operands) -> list[Tensor | None]:
        """Return the gradients in the order and dtypes of the operands."""
        parts = (self.hidden, self.weight, self.bias)
        return [
            None if part is None or x is None else part.to(x.dtype)
            for part, x in zip(parts, operands, strict=True)
        ]


class GradientSums:
    """Accumulators of the operands' gradients, for loops over tiles of rows and of columns.

    If the outer loop is over rows, the gradient of hidden is finished tile by tile, else that of the weight.
    """

    def __init__(self, head: Head, *, needs: Needs, rows_outside: bool) -> None:
        self.head = head
        self.rows_outside = rows_outside
        self.sums_weight = needs[1]
        settings = head.settings
        rows = head.hidden.shape[0]
        device = head.hidden.device
        wide = settings.accumulator

        # The first tile overwrites a sum that tiles cover completely; other sums start at zero.
        self.hidden: Tensor | None = None
        if needs[0]:
            blank = torch.empty if settings.columns else torch.zeros
            dtype = head.hidden.dtype if rows_outside else wide
            self.hidden = blank(head.hidden.shape, dtype=dtype, device=device)

        self.weight: Tensor | None = None
        self._wide_weight: WideSum | None = None
        if needs[1] and rows_outside and rows and head.weight.dtype != wide:
            self._wide_weight = WideSum(head.weight, columns=settings.columns, width=head.tile[1], wide=wide)
        elif needs[1]:
            blank = torch.empty if rows and settings.columns == head.weight.shape[0] else torch.zeros
            self.weight = blank(head.weight.shape, dtype=head.weight.dtype, device=device)

        self.bias: Tensor | None = None
        if needs[2]:
            self.bias = torch.zeros(head.weight.shape[:1], dtype=wide, device=device)

        self._tile: Tensor | None = None
        # Without rows, or without columns on this rank, no product fills a tile: start it at 0.
        self._blank = torch.empty_like if rows and settings.columns else torch.zeros_like

    def open(self, outer: slice) -> None:
        """Begin a tile of the outer loop; a gradient in a narrow dtype is summed in a wide tile."""
        total = self.hidden if self.rows_outside else self.weight
        if total is not None:
            wide = self.head.settings.accumulator
            tile = total[outer]
            if tile.dtype != wide:
                tile = self._blank(tile, dtype=wide)
            self._tile = tile

    def add(self, dx: Tensor, rows: slice, columns: slice) -> None:
        """Add the contribution of a tile, whose raw products have the gradient ``dx`` ``[c, v]``."""
        head = self.head
        self.add_bias(dx, columns)
        if head.settings.native:  # cast once for all products
            dx = dx.to(head.settings.compute)
        self.add_hidden(dx, head.weight[columns], rows, columns)
        if self.sums_weight:
            hidden = head.hidden[rows] if head.counts is None else head.counted(head.hidden, rows)
            self.add_weight(dx, hidden, rows, columns)

    def add_bias(self, dx: Tensor, columns: slice) -> None:
        """Add a tile's part of the bias's gradient, if it needs one."""
        if self.bias is not None:
            self.bias[columns] += dx.sum(0, dtype=self.bias.dtype)

    def add_hidden(self, dx: Tensor, weight: Tensor, rows: slice, columns: slice) -> None:
        """Add ``dx @ weight`` to the gradient of hidden, if it needs one; ``weight`` is ``[v, H]``."""
        if self.hidden is None:
            return
        total = self._tile if self.rows_outside else self.hidden[rows]
        assert total is not None
        accumulate(total, dx, weight, self.head.settings.compute, first=columns.start == 0)

    def add_weight(self, dx: Tensor, hidden: Tensor, rows: slice, columns: slice) -> None:
        """Add ``dx.T @ hidden`` to the gradient of the weight, if it needs one; ``hidden`` is ``[c, H]``."""
        if not self.sums_weight:
            return
        if self._wide_weight is not None:
            total = self._wide_weight.tile(columns)
        elif self.rows_outside and self.weight is not None:
            total = self.weight[columns]
        else:
            assert self._tile is not None
            total = self._tile

        accumulate(total, dx.t(), hidden, self.head.settings.compute, first=rows.start == 0)

    def close(self, outer: slice) -> None:
        """Finish a tile of the outer loop and round its accumulator."""
        total = self.hidden if self.rows_outside else self.weight
        if total is not None and self._tile is not None and self._tile.dtype != total.dtype:
            total[outer] = self._tile

    def result(self) -> HeadGradients:
        """Return the accumulated gradients of the operands."""
        if self._wide_weight is not None:
            self.weight = self._wide_weight.result()
        return HeadGradients(hidden=self.hidden, weight=self.weight, bias=self.bias)


class WideSum:
    """A gradient ``[V, H]`` that is summed in a dtype twice as wide, with the memory of two gradients.

    A sum of tiles in bf16 would have an error of 2 % for 65,000 tokens. The first half of the wide sum uses
    the result's memory, and is rounded in place from the start. That takes ``4VH`` bytes, not ``6VH``. The
    first ``columns`` rows get a sum, the others are zero. A tile of ``width`` rows never spans two halves.
    """

    def __init__(self, like: Tensor, *, columns: int, width: int, wide: torch.dtype) -> None:
        self._narrow = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        self._columns = columns
        self._width = width
        inside = columns // 2 // width * width if wide.itemsize == 2 * like.dtype.itemsize else 0
        room = self._narrow.view(-1)[: inside * 2 * like.shape[1]]
        self._front = room.view(wide).view(inside, like.shape[1])
        self._back = torch.empty((columns - inside, like.shape[1]), dtype=wide, device=like.device)

    def tile(self, columns: slice) -> Tensor:
        """Return the accumulator of some rows, uninitialised at first."""
        inside = len(self._front)
        if columns.start < inside:
            return self._front[columns]
        return self._back[columns.start - inside : columns.stop - inside]

    def result(self) -> Tensor:
        """Round the sums to the narrow dtype; nothing can be added afterwards."""
        narrow = self._narrow
        inside = len(self._front)
        for start in range(0, inside, self._width):  # ascending: only rounded sums get overwritten
            rows = slice(start, start + self._width)
            narrow[rows] = self._front[rows].to(narrow.dtype)
        narrow[inside : self._columns] = self._back
        if self._columns < len(narrow):
            narrow[self._columns :] = 0.0
        return narrow
