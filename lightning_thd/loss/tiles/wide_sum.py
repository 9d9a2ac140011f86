"""Tiles of a narrow gradient -> their sum, added up in a dtype twice as wide, in the memory of two of them.

V vocabulary columns held here, H hidden size. The sum of thousands of tokens needs fp32 where the gradient
is bf16: added up in bf16, tile by tile, it is off by 2 % after 65,000 tokens. Its first half lives in the
memory of the result, and is rounded into it from the front at the end, when what was there is no longer
needed: ``4VH`` bytes at most, against ``6VH`` of a wide sum and a result.
"""

from __future__ import annotations

import torch
from torch import Tensor


class WideSum:
    """A gradient ``[V, H]`` that is summed in a wide dtype and rounded at the end.

    Args:
        like: gives shape, dtype and device of the result.
        columns: rows of it that get a sum; the others are zero.
        width: rows of a tile; a tile never spans the two halves.
        wide: dtype of the sums.
    """

    def __init__(self, like: Tensor, *, columns: int, width: int, wide: torch.dtype) -> None:
        self._narrow = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        self._columns, self._width = columns, width
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
        narrow, inside = self._narrow, len(self._front)
        for start in range(0, inside, self._width):  # ascending: what is overwritten has been rounded
            rows = slice(start, start + self._width)
            narrow[rows] = self._front[rows].to(narrow.dtype)
        narrow[inside : self._columns] = self._back
        narrow[self._columns :] = 0.0
        return narrow
