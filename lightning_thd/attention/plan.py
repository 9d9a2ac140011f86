"""Host offsets and a window -> tiles: which rows of q meet which rows of k, and where the diagonal runs in them.

The tiles of a plan cover every query row once; a query's keys all lie in its tile, so no partial results are merged.
"""

from __future__ import annotations

from dataclasses import dataclass

# Rows of queries in a tile whose visibility needs a mask: enough to keep the kernel's matrix products full.
_MASKED_ROWS = 256


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows ``[q0, q1)`` against key rows ``[k0, k1)``; local query i stands at local key ``i + shift``."""

    q0: int
    q1: int
    k0: int
    k1: int
    shift: int
    left: int
    right: int

    @property
    def sees_all(self) -> bool:
        """Whether every query of the tile sees every key."""
        rows, keys = self.q1 - self.q0, self.k1 - self.k0
        below = self.left < 0 or self.left >= rows - 1 + self.shift
        above = self.right < 0 or self.shift + self.right >= keys - 1
        return below and above

    @property
    def is_triangle(self) -> bool:
        """Whether query i sees exactly the keys 0..i."""
        rows, keys = self.q1 - self.q0, self.k1 - self.k0
        return (
            self.shift == 0 and self.right == 0 and rows == keys and (self.left < 0 or self.left >= rows - 1)
        )


def make_tiles(cu_q: list[int], cu_kv: list[int], *, left: int, right: int) -> list[Tile]:
    """Cut every sequence into tiles.

    Args:
        cu_q: offsets of the query sequences, S + 1 ints.
        cu_kv: offsets of the key sequences, S + 1 ints.
        left: keys seen before a query's position, -1 for all.
        right: keys seen after it, -1 for all, 0 for causal.

    Returns:
        Tiles in row order; query rows that see no key at all are in no tile. ``([0, 3], [0, 3], left=-1, right=0)``
        gives one triangle.
    """
    tiles: list[Tile] = []
    for i in range(len(cu_q) - 1):
        tiles += _sequence_tiles(cu_q[i], cu_q[i + 1], cu_kv[i], cu_kv[i + 1], left, right)
    return tiles


def _sequence_tiles(q0: int, q1: int, k0: int, k1: int, left: int, right: int) -> list[Tile]:
    shift = (k1 - k0) - (q1 - q0)
    if q1 == q0 or k1 == k0:
        return []
    whole = Tile(q0, q1, k0, k1, shift, left, right)
    if whole.sees_all or whole.is_triangle:
        return [whole]
    if left < 0 and right == 0 and shift < 0:  # the first queries stand before every key
        return [Tile(q0 - shift, q1, k0, k1, 0, left, right)]
    tiles = []
    for start in range(q0, q1, _MASKED_ROWS):
        stop = min(start + _MASKED_ROWS, q1)
        first, last = start - q0 + shift, stop - 1 - q0 + shift  # positions of the tile's outermost queries
        low = k0 if left < 0 else k0 + max(0, first - left)
        high = k1 if right < 0 else min(k1, k0 + last + right + 1)
        if low < high:
            tiles.append(Tile(start, stop, low, high, first - (low - k0), left, right))
    return tiles
