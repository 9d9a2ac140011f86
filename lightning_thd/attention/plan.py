"""Host offsets and a window -> kernel calls: which rows of q meet which rows of k, and where the diagonal runs.

Every query row lies in one tile together with all the keys it sees, so no partial results are merged. The kernel
computes masked scores too (its causal flag skips keys by 512 only), so a causal sequence is cut into rows of tiles
that end at their last visible key: half the arithmetic at 512 tokens. Sequences shorter than a call's overhead is
worth are padded to a common length and share a call.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

# Causal sequences up to SHORT tokens share calls: at 8 heads of 64 a call's overhead (about 30 us) equals the
# arithmetic of 40 tokens. Padding within a call may add PADDING of the arithmetic, or FREE pairs (the overhead).
SHORT = 128
PADDING = 1.25
FREE_PAIRS = 1500
# Rows in one call of short sequences: with 8 heads of 64 in fp32, 1 MiB a tensor, so copies stay in cache.
CALL_ROWS = 512
# Causal sequences longer than this go to the kernel whole: what its causal flag wastes is under a tenth there.
WHOLE = 3072
# Masks stay below this many entries (4 MiB in fp32): longer keys get fewer rows of queries.
MASK_CELLS = 1 << 20


@dataclass(frozen=True, slots=True)
class Tiles:
    """Equal tiles for one kernel call; in each, local query i stands at local key ``i + shift``.

    Attributes:
        rows: queries of a tile.
        keys: keys of a tile.
        shift: keys minus rows where the tile ends on the diagonal.
        q_starts: first query row of every tile.
        k_starts: first key row of every tile.
        lengths: real rows of every tile where tiles are padded (triangles only), else None.
    """

    rows: int
    keys: int
    shift: int
    q_starts: tuple[int, ...]
    k_starts: tuple[int, ...]
    lengths: tuple[int, ...] | None = None

    def sees_all(self, left: int, right: int) -> bool:
        """Whether every query sees every key."""
        below = left < 0 or left >= self.rows - 1 + self.shift
        above = right < 0 or self.shift + right >= self.keys - 1
        return below and above

    def is_triangle(self, left: int, right: int) -> bool:
        """Whether query i sees exactly the keys 0..i: what the kernel's causal flag means."""
        return (
            self.shift == 0 and right == 0 and self.rows == self.keys and (left < 0 or left >= self.rows - 1)
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """Calls whose key rows no other piece touches.

    Attributes:
        calls: the kernel calls.
        k0: first key row; the calls' ``k_starts`` count from here.
        k1: one past the last key row, where ``shared``.
        shared: whether a key may lie in several tiles, so that its gradients add up.
    """

    calls: tuple[Tiles, ...]
    k0: int
    k1: int
    shared: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """All calls of a pack; ``blank_q`` rows see no key, ``blank_k`` rows are seen by no query: both get zeros."""

    pieces: tuple[Piece, ...]
    blank_q: tuple[tuple[int, int], ...]
    blank_k: tuple[tuple[int, int], ...]


@lru_cache(maxsize=32)
def make_plan(
    cu_q: tuple[int, ...], cu_kv: tuple[int, ...], *, left: int, right: int, max_cells: int | None = None
) -> Plan:
    """Cut the sequences of a pack into kernel calls; every layer of a step gets the same plan from the cache.

    Args:
        cu_q: offsets of the query sequences, S + 1 ints.
        cu_kv: offsets of the key sequences, S + 1 ints.
        left: keys seen before a query's position, -1 for all.
        right: keys seen after it, -1 for all, 0 for causal.
        max_cells: rows x keys of any call, for a path that holds its scores; None for the flash kernel.

    Returns:
        The plan. ``((0, 3, 5), (0, 3, 5), left=-1, right=0)`` is one call of two triangles padded to 3 rows.
    """
    singles: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
    triangles: list[tuple[int, int]] = []
    pieces: list[Piece] = []
    blank_q: list[tuple[int, int]] = []
    blank_k: list[tuple[int, int]] = []
    for q0, q1, k0, k1 in zip(cu_q, cu_q[1:], cu_kv, cu_kv[1:], strict=False):
        if q0 == q1 or k0 == k1:
            blank_q.append((q0, q1))
            blank_k.append((k0, k1))
            continue
        shift = (k1 - k0) - (q1 - q0)
        blind = min(max(0, -(shift + right)), q1 - q0) if right >= 0 else 0  # they stand before every key
        blank_q.append((q0, q0 + blind))
        q0, shift = q0 + blind, shift + blind
        if q0 == q1:
            blank_k.append((k0, k1))
            continue
        whole = Tiles(q1 - q0, k1 - k0, shift, (q0,), (k0,))
        if max_cells is None and whole.is_triangle(left, right) and whole.rows <= SHORT and q0 == k0:
            triangles.append((whole.rows, q0))
        elif _in_one_call(whole, left, right, max_cells):
            singles[whole.rows, whole.keys, whole.shift].append((q0, k0))
        else:
            local = Tiles(whole.rows, whole.keys, shift, (q0,), (0,))
            pieces.append(Piece(_cut_rows(local, left, right, max_cells), k0, k1, shared=True))
    pieces += _equal_groups(singles, max_cells) + _padded_groups(triangles)
    return Plan(tuple(pieces), _nonempty(blank_q), _nonempty(blank_k))


def _nonempty(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    return tuple((start, stop) for start, stop in ranges if start < stop)


def _in_one_call(whole: Tiles, left: int, right: int, max_cells: int | None) -> bool:
    if max_cells is not None:
        return whole.rows * whole.keys <= max_cells and (max(whole.rows, whole.keys) <= SHORT)
    if whole.is_triangle(left, right):
        return whole.rows <= SHORT or whole.rows > WHOLE
    return whole.sees_all(left, right)


def _cut_rows(whole: Tiles, left: int, right: int, max_cells: int | None) -> tuple[Tiles, ...]:
    """Cut one sequence into rows of tiles, each from its first visible key to its last."""
    height = _tile_rows(whole, left, right, max_cells)
    calls: list[Tiles] = []
    for start in range(0, whole.rows, height):
        stop = min(start + height, whole.rows)
        first, last = start + whole.shift, stop - 1 + whole.shift  # positions of the outermost queries
        low = 0 if left < 0 else max(0, first - left)
        high = whole.keys if right < 0 else min(whole.keys, last + right + 1)
        q_starts, k_starts = (whole.q_starts[0] + start,), (low,)
        shape = (stop - start, high - low, first - low)
        if calls and _may_extend(calls[-1], shape):
            previous = calls.pop()
            q_starts, k_starts = previous.q_starts + q_starts, previous.k_starts + k_starts
        calls.append(Tiles(*shape, q_starts, k_starts))
    return tuple(calls)


def _may_extend(group: Tiles, shape: tuple[int, int, int]) -> bool:
    """Whether a tile has the shape of its neighbours and may share their call (windows far from both ends)."""
    same = (group.rows, group.keys, group.shift) == shape
    return same and (len(group.q_starts) + 1) * group.keys <= CALL_ROWS


def _tile_rows(whole: Tiles, left: int, right: int, max_cells: int | None) -> int:
    """Choose the height of tiles: low ones waste less behind the diagonal, high ones run at a better rate."""
    reach = whole.keys if left < 0 else min(whole.keys, left + 1 + max(right, 0))
    if right < 0:
        reach = whole.keys
    height = 64 if reach <= 1024 else 128
    if reach < 64:
        height = 32
    if max_cells is not None:
        height = min(height, max_cells // (reach + height))
    return max(8, min(height, MASK_CELLS // whole.keys))


def _equal_groups(
    singles: dict[tuple[int, int, int], list[tuple[int, int]]], max_cells: int | None
) -> list[Piece]:
    pieces = []
    for (rows, keys, shift), starts in singles.items():
        cells = CALL_ROWS * SHORT if max_cells is None else max_cells
        count = max(1, min(CALL_ROWS // max(rows, keys), cells // (rows * keys)))
        for i in range(0, len(starts), count):
            q_starts, k_starts = zip(*starts[i : i + count], strict=True)
            call = Tiles(rows, keys, shift, q_starts, k_starts)
            pieces.append(Piece((call,), 0, 0, shared=False))
    return pieces


def _padded_groups(triangles: list[tuple[int, int]]) -> list[Piece]:
    """Let triangles of similar length share calls, longest first, while padding costs less than another call."""
    pieces = []
    group: list[tuple[int, int]] = []
    spent = real = 0
    for length, start in [*sorted(triangles, reverse=True), (0, 0)]:
        rows = group[0][0] if group else length
        spent, real = spent + rows * rows, real + length * length
        full = (len(group) + 1) * rows > CALL_ROWS
        if group and (length == 0 or full or spent > PADDING * real + FREE_PAIRS):
            group.sort(key=lambda member: member[1])
            lengths, starts = zip(*group, strict=True)
            padded = None if min(lengths) == rows else lengths
            pieces.append(Piece((Tiles(rows, rows, 0, starts, starts, padded),), 0, 0, shared=False))
            group, spent, real = [], length * length, length * length
        group.append((length, start))
    return pieces
