"""Rows of a packed tensor <-> the rows one piece of work reads, as a view where they lie side by side.

Legend: T slots, N rows of a piece, B tiles of a call, H heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

_Flags = np.ndarray[tuple[int, int], np.dtype[np.bool_]]


@dataclass(frozen=True)
class Rows:
    """Blocks of rows of a packed tensor, which a piece of work sees one after the other as its own N rows.

    Attributes:
        starts: first row of every block.
        length: rows of a block.
        lengths: real rows of every block; beyond them its first row repeats. None where all are real.
    """

    starts: tuple[int, ...]
    length: int
    lengths: tuple[int, ...] | None = None

    @property
    def total(self) -> int:
        """N, padding included."""
        return len(self.starts) * self.length

    @cached_property
    def span(self) -> tuple[int, int] | None:
        """First row and one past the last where the blocks lie side by side, else None."""
        adjoining = all(b - a == self.length for a, b in pairwise(self.starts))
        if self.lengths is not None or not adjoining:
            return None
        return self.starts[0], self.starts[0] + self.total

    def take(self, x: Tensor) -> Tensor:
        """Return rows of ``[T, ...]`` as ``[N, ...]``: a view where there is a span, else a copy."""
        if self.span is None:
            return x.index_select(0, self._indices)
        start, stop = self.span
        return x if (start, stop) == (0, x.shape[0]) else x[start:stop]

    def put(self, x: Tensor, part: Tensor) -> None:
        """Write ``[N, ...]`` to x ``[T, ...]``; padded rows are dropped."""
        if self.span is not None:
            x[slice(*self.span)].copy_(part)
        else:
            self.put_tiles(x, part.view(len(self.starts), self.length, *part.shape[1:]), self._blocks)

    def put_tiles(self, x: Tensor, part: Tensor, tiles: Spaced) -> None:
        """Write ``[B, length, ...]``, a run of every block, to x ``[T, ...]``; padded rows are dropped."""
        if self.span is not None:
            tiles.view(self.take(x)).copy_(part)
            return
        real, target = self._targets(tiles)
        part = part.flatten(0, 1)
        x.index_copy_(0, target, (part if real is None else part.index_select(0, real)).to(x.dtype))

    def fill_padding(self, part: Tensor, value: float) -> None:
        """Set the padded rows of ``[N, ...]`` to a value, in place."""
        part.index_fill_(0, self._padded, value)

    def prepare(self, tiles: Iterable[Spaced]) -> None:
        """Make all index tensors at once: small and lasting, between large ones they would split the heap."""
        if self.span is None:
            _ = self._indices, self._padded
            for each in (*tiles, self._blocks):
                self._targets(each)

    @cached_property
    def _blocks(self) -> Spaced:
        return Spaced(0, self.length, len(self.starts), self.length)

    @cached_property
    def _indices(self) -> Tensor:
        grid = np.where(self._real, np.arange(self.length), 0) + np.array(self.starts)[:, None]
        return torch.from_numpy(grid.ravel())

    @cached_property
    def _padded(self) -> Tensor:
        return torch.from_numpy(np.flatnonzero(~self._real))

    @cached_property
    def _known_targets(self) -> dict[Spaced, tuple[Tensor | None, Tensor]]:
        return {}

    def _targets(self, tiles: Spaced) -> tuple[Tensor | None, Tensor]:
        """Return which rows of the tiles are real, None for all, and where they lie in the packed tensor."""
        if tiles not in self._known_targets:
            inside = slice(tiles.start, tiles.start + tiles.length)
            real = self._real[:, inside]
            grid = np.array(self.starts)[:, None] + np.arange(self.length)[inside]
            which = None if real.all() else torch.from_numpy(np.flatnonzero(real))
            self._known_targets[tiles] = which, torch.from_numpy(grid[real])
        return self._known_targets[tiles]

    @cached_property
    def _real(self) -> _Flags:
        lengths = (self.length,) * len(self.starts) if self.lengths is None else self.lengths
        real: _Flags = np.arange(self.length)[None, :] < np.array(lengths)[:, None]
        return real


@dataclass(frozen=True, slots=True)
class Spaced:
    """Equal, evenly spaced runs of a piece's rows, one a tile; they may overlap."""

    start: int
    step: int
    count: int
    length: int

    def view(self, x: Tensor) -> Tensor:
        """Return the runs of ``[N, ...]`` as a view ``[B, length, ...]``, to read where they overlap."""
        stride = x.stride()
        return x.as_strided(
            (self.count, self.length, *x.shape[1:]),
            (self.step * stride[0], *stride),
            x.storage_offset() + self.start * stride[0],
        )

    def add(self, x: Tensor, part: Tensor) -> None:
        """Add ``[B, length, ...]`` to the runs of x, in a fixed order where they overlap."""
        step = self.length if self.count == 1 else self.step
        for low in range(0, self.length, step):
            width = min(step, self.length - low)
            run = Spaced(self.start + low, self.step, self.count, width)
            run.view(x).add_(part if width == self.length else part[:, low : low + width])
