"""Host offsets and a window -> kernel calls: which rows of q meet which of k, and where the diagonal runs.

The flash kernel computes masked scores too: its causal flag skips keys 512 at a time, so a causal sequence
of 512 tokens costs as much as a bidirectional one. So sequences are cut. Forward: into rows of queries, each
with all the keys it sees, so that nothing is merged. Backward: into columns of keys, each with all the
queries that see it, which keeps causality in the kernel's top-left form without a mask and leaves only dq to
add up. Sequences shorter than a call's overhead is worth are padded to a common length and share a call.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

# Causal sequences up to SHORT tokens share calls: at 8 heads of 64 a call's overhead (about 30 us) equals the
# arithmetic of 40 tokens. Padding within a call may add PADDING of the arithmetic, or FREE_PAIRS (the
# overhead).
SHORT = 128
PADDING = 1.25
FREE_PAIRS = 1500
# Elements (rows x heads x head size) of a sequence up to which it shares a padded call with others of like
# length: copying more than these takes longer than a call's overhead, so longer ones are read in place (two
# cores of a Zen 4 server: 48 rows of 8 heads of 64).
GROUPED_ELEMENTS = 48 * 8 * 64
# Rows in one call of short sequences: with 8 heads of 64 in fp32, 1 MiB a tensor, so copies stay in cache.
CALL_ROWS = 512
# Causal sequences longer than this go forward whole: masks and low tiles cost more than the causal flag
# wastes.
WHOLE_FORWARD = 1280
# (keys or queries in reach up to, tile height forward, tile width backward), measured on two cores of a Zen
# 4 server.
TILES = ((64, 32, 32), (256, 64, 64), (512, 128, 64), (1280, 128, 128), (1 << 62, 128, 256))
# A column of a backward is cut into stretches of this many queries: 1 MiB of dq a head of 64 in fp32.
COLUMN_ROWS = 4096
# Masks stay below this many entries: 4 MiB in fp32.
MASK_CELLS = 1 << 20


@dataclass(frozen=True, slots=True)
class Tiles:
    """Equal tiles for one kernel call; in each, local query i stands at local key ``i + shift``.

    Attributes:
        rows: queries of a tile.
        keys: keys of a tile.
        shift: keys minus rows where the tile ends on the diagonal.
        q_starts: first query row of every tile, counted from the piece's.
        k_starts: first key row of every tile, counted from the piece's.
        lengths: real rows of every tile where tiles are padded (triangles only), else None.
    """

    rows: int
    keys: int
    shift: int
    q_starts: tuple[int, ...]
    k_starts: tuple[int, ...]
    lengths: tuple[int, ...] | None = None

    def sees_all(self, left: int, right: int) -> bool:
        """Return whether every query sees every key."""
        below = left < 0 or left >= self.rows - 1 + self.shift
        above = right < 0 or self.shift + right >= self.keys - 1
        return below and above

    def is_top_left(self, left: int, right: int) -> bool:
        """Return whether query i sees exactly the keys up to i: what the kernel's causal flag means."""
        return self.shift == 0 and right == 0 and (left < 0 or left >= self.rows - 1)


@dataclass(frozen=True, slots=True)
class Piece:
    """Kernel calls whose rows no other piece touches, so that it can run by itself.

    Attributes:
        calls: the kernel calls. Within a cut sequence a row may lie in several: gradients add up.
        q: query rows ``(first, one past the last)`` that a cut sequence's starts count from, else None.
        k: key rows likewise.
    """

    calls: tuple[Tiles, ...]
    q: tuple[int, int] | None = None
    k: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """All kernel calls of a pack, and the rows that get zeros: those that see, or are seen by, nothing.

    ``at_once`` is one call for the whole pack, where its sequences are all of one length and none is cut: it
    computes what the pieces do.
    """

    pieces: tuple[Piece, ...]
    blank_q: tuple[tuple[int, int], ...]
    blank_k: tuple[tuple[int, int], ...]
    at_once: Tiles | None = None


@lru_cache(maxsize=32)
def make_plan(
    cu_q: tuple[int, ...],
    cu_kv: tuple[int, ...],
    *,
    left: int,
    right: int,
    by_keys: bool = False,
    max_cells: int | None = None,
    grouped: int = SHORT,
) -> Plan:
    """Cut the sequences of a pack into kernel calls; every layer of a step gets the same plan from the cache.

    Args:
        cu_q: offsets of the query sequences, S + 1 ints.
        cu_kv: offsets of the key sequences, S + 1 ints.
        left: keys seen before a query's position, -1 for all.
        right: keys seen after it, -1 for all, 0 for causal.
        by_keys: cut into columns of keys (a backward) instead of rows of queries (a forward).
        max_cells: rows x keys of any call, for a path that holds its scores; None for the flash kernel.
        grouped: rows up to which short sequences share padded calls; longer ones only with equal neighbours.

    Returns:
        The plan. ``((0, 3, 5), (0, 3, 5), left=-1, right=0)`` is one call of two triangles padded to 3 rows.
    """
    singles: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
    triangles: list[tuple[int, int]] = []
    pieces: list[Piece] = []
    blank_q: list[tuple[int, int]] = []
    blank_k: list[tuple[int, int]] = []
    cutter = _Cutter(left, right, by_keys, max_cells)
    for q0, q1, k0, k1 in zip(cu_q, cu_q[1:], cu_kv, cu_kv[1:], strict=False):
        blind = cutter.blind_rows(q1 - q0, k1 - k0)
        blank_q.append((q0, q0 + blind))
        q0 += blind
        rows, keys = q1 - q0, k1 - k0
        if rows == 0 or keys == 0:
            blank_k.append((k0, k1))
            continue
        whole = Tiles(rows, keys, keys - rows, (q0,), (k0,))
        if max_cells is None and whole.is_top_left(left, right) and rows <= SHORT and q0 == k0:
            triangles.append((rows, q0))
        elif cutter.takes_whole(whole):
            singles[rows, keys, whole.shift].append((q0, k0))
        else:
            calls, seen = cutter.cut(rows, keys)
            pieces.append(Piece(calls, (q0, q1), (k0, k1)))
            blank_k += [(k0, k0 + seen[0]), (k0 + seen[1], k1)]
    plan = Plan(
        (*pieces, *_equal_groups(singles, max_cells), *_triangles(triangles, grouped)),
        _nonempty(blank_q),
        _nonempty(blank_k),
    )
    whole_pack = not (pieces or plan.blank_q or plan.blank_k) and max_cells is None
    return replace(plan, at_once=_one_call(cu_q, cu_kv)) if whole_pack else plan


def _one_call(cu_q: tuple[int, ...], cu_kv: tuple[int, ...]) -> Tiles | None:
    """Return a single kernel call for sequences of equal length; None where they differ or are empty."""
    count = len(cu_q) - 1
    rows, keys = cu_q[-1] // max(1, count), cu_kv[-1] // max(1, count)
    if not rows or not keys or len(cu_kv) != len(cu_q):
        return None
    q_starts, k_starts = tuple(range(0, rows * count, rows)), tuple(range(0, keys * count, keys))
    if (*q_starts, rows * count) != cu_q or (*k_starts, keys * count) != cu_kv:
        return None
    return Tiles(rows, keys, keys - rows, q_starts, k_starts)


@dataclass(frozen=True, slots=True)
class _Cutter:
    left: int
    right: int
    by_keys: bool
    max_cells: int | None

    def blind_rows(self, rows: int, keys: int) -> int:
        """Count the first queries that see no key: all without keys, or those too far before the first."""
        if keys == 0:
            return rows
        return min(rows, max(0, rows - keys - self.right)) if self.right >= 0 else 0

    def takes_whole(self, whole: Tiles) -> bool:
        """Return whether a sequence is computed as one tile, uncut."""
        if self.max_cells is not None:
            return whole.rows * whole.keys <= min(self.max_cells, SHORT * SHORT)
        if self.right == 0 and whole.is_top_left(self.left, self.right):
            return whole.rows <= SHORT or (not self.by_keys and whole.rows > WHOLE_FORWARD)
        return whole.sees_all(self.left, self.right)

    def cut(self, rows: int, keys: int) -> tuple[tuple[Tiles, ...], tuple[int, int]]:
        """Cut one sequence into tiles; return the calls and the range of keys that queries see."""
        shapes = self._columns(rows, keys) if self.by_keys else self._rows(rows, keys)
        calls: list[Tiles] = []
        for rows_of_tile, keys_of_tile, shift, q_start, k_start in shapes:
            q_starts: tuple[int, ...] = (q_start,)
            k_starts: tuple[int, ...] = (k_start,)
            if calls and _may_extend(calls[-1], (rows_of_tile, keys_of_tile, shift)):
                previous = calls.pop()
                q_starts, k_starts = previous.q_starts + q_starts, previous.k_starts + k_starts
            calls.append(Tiles(rows_of_tile, keys_of_tile, shift, q_starts, k_starts))
        seen = min(call.k_starts[0] for call in calls), max(call.k_starts[-1] + call.keys for call in calls)
        return tuple(calls), seen

    def _rows(self, rows: int, keys: int) -> list[tuple[int, int, int, int, int]]:
        shift, height, tiles = keys - rows, self._tile_size(keys, forward=True), []
        for start in range(0, rows, height):
            stop = min(start + height, rows)
            low = 0 if self.left < 0 else max(0, start + shift - self.left)
            high = keys if self.right < 0 else min(keys, stop + shift + self.right)
            tiles.append((stop - start, high - low, start + shift - low, start, low))
        return tiles

    def _columns(self, rows: int, keys: int) -> list[tuple[int, int, int, int, int]]:
        shift, width, tiles = keys - rows, self._tile_size(rows, forward=False), []
        edges = list(range(max(0, shift), keys, width))  # a column that starts on the diagonal needs no mask
        edges = [*range(0, max(0, shift), width), *edges, keys]
        for start, stop in pairwise(edges):
            low = 0 if self.right < 0 else max(0, start - self.right - shift)
            high = rows if self.left < 0 else min(rows, stop + self.left - shift)
            for first in range(low, high, COLUMN_ROWS):
                last = min(first + COLUMN_ROWS, high)
                tiles.append((last - first, stop - start, first + shift - start, first, start))
        return tiles

    def _tile_size(self, across: int, *, forward: bool) -> int:
        """Choose how many rows or keys a tile has: few waste less at the diagonal, many run faster."""
        reach = across
        if self.left >= 0 and self.right >= 0:
            reach = min(across, self.left + self.right + 1)
        size = next(height if forward else width for limit, height, width in TILES if reach <= limit)
        if self.max_cells is not None:
            size = min(size, self.max_cells // (reach + size))
        elif forward or self.left >= 0 or self.right > 0:
            size = min(size, MASK_CELLS // (reach + size))
        return max(8, size)


def _may_extend(group: Tiles, shape: tuple[int, int, int]) -> bool:
    """Return whether a tile has its neighbours' shape and may share their kernel call."""
    same = (group.rows, group.keys, group.shift) == shape
    return same and (len(group.q_starts) + 1) * max(group.keys, group.rows) <= CALL_ROWS


def _nonempty(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    return tuple((start, stop) for start, stop in ranges if start < stop)


def _equal_groups(
    singles: dict[tuple[int, int, int], list[tuple[int, int]]], max_cells: int | None
) -> list[Piece]:
    pieces = []
    for (rows, keys, shift), starts in singles.items():
        cells = CALL_ROWS * SHORT if max_cells is None else max_cells
        count = max(1, min(CALL_ROWS // max(rows, keys), cells // (rows * keys)))
        for i in range(0, len(starts), count):
            q_starts, k_starts = zip(*starts[i : i + count], strict=True)
            pieces.append(Piece((Tiles(rows, keys, shift, q_starts, k_starts),)))
    return pieces


def _triangles(triangles: list[tuple[int, int]], grouped: int) -> list[Piece]:
    """Put the shorter causal tiles into padded calls, and longer ones into calls with equal neighbours."""
    pieces = []
    run: list[int] = []
    rows = 0
    for length, start in [*((n, at) for n, at in triangles if n > grouped), (0, 0)]:
        if run and (length != rows or start != run[-1] + rows or (len(run) + 1) * rows > CALL_ROWS):
            pieces.append(Piece((Tiles(rows, rows, 0, tuple(run), tuple(run)),)))
            run = []
        run.append(start)
        rows = length
    return pieces + _padded_groups([member for member in triangles if member[0] <= grouped])


def _padded_groups(triangles: list[tuple[int, int]]) -> list[Piece]:
    """Group causal tiles of similar length into one padded call while that costs less than another call."""
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
            pieces.append(Piece((Tiles(rows, rows, 0, starts, starts, padded),)))
            group, spent, real = [], length * length, length * length
        group.append((length, start))
    return pieces
