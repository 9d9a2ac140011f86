"""Offsets on the host and a window -> kernel calls: the rows of q and k in each call, and their shift.

The flash kernel's causal flag skips keys only 512 at a time, so sequences are cut into tiles. The forward
cuts queries: a tile has all the keys that its queries see, so no results are merged. The backward cuts keys:
a tile has all queries that see its keys, so only dq is summed (above COLUMN_ROWS queries, dk and dv too).
Long runs of adjacent short sequences of equal length are read in place; other short ones are copied, padded.
Legend: T slots, N rows of a piece, B tiles of a call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

# Causal sequences up to SHORT tokens share calls, because the overhead of one call each would be large: about
# 20 us, as much as the arithmetic of 40 tokens with 8 heads of 64. A padded call may compute up to PADDING
# times its real query-key pairs, plus FREE_PAIRS, which cost less than the overhead of another call.
SHORT = 128
PADDING = 1.25
FREE_PAIRS = 1500
# The maximum of rows x heads x head size of a sequence in a padded call; copying more would be slower.
GROUPED_ELEMENTS = 72 * 8 * 64
# The maximum of rows in a call of short sequences: 1 MiB a tensor (8 heads of 64, fp32), to stay in cache.
CALL_ROWS = 512
# A forward call's overhead equals this much arithmetic (rows x keys x heads x head size): 25 us, if one score
# for a head of 64 takes 4.5 ns (one core of a Zen 4 server).
CALL_PRODUCTS = 350_000
# Keys per step of the kernel's forward: 16 fp32 values of AVX-512. The exp of leftover keys runs one by one.
KEYS = 16
# Longer sequences are not cut in a forward with only a causal mask: cutting costs more than it saves.
WHOLE_FORWARD = 1280
# Rows of (limit of visible keys or queries, tile height in the forward, tile width in the backward), measured
# on two cores of a Zen 4 server.
TILES = ((96, 32, 32), (128, 32, 64), (256, 64, 64), (512, 128, 64), (1280, 128, 128), (1 << 62, 128, 256))
# The maximum of queries, or of keys without a mask, in a backward's tile: 1 MiB of dq per head of 64 in fp32.
COLUMN_ROWS = 4096
MASK_CELLS = 1 << 20  # The maximum of entries of a mask, 4 MiB in fp32; tiles of 8 rows or keys may exceed it


@dataclass(frozen=True)
class Rows:
    """Blocks of ``length`` rows of a packed tensor; shorter blocks are padded with their first row."""

    starts: tuple[int, ...]
    length: int
    lengths: tuple[int, ...] | None = None  # rows of each block without padding; None if all have ``length``

    @property
    def total(self) -> int:
        """The number of rows N, padding included."""
        return len(self.starts) * self.length

    @cached_property
    def span(self) -> tuple[int, int] | None:
        """The (start, stop) rows if the blocks are adjacent and unpadded, else None."""
        adjoining = all(b - a == self.length for a, b in pairwise(self.starts))
        if self.lengths is not None or not adjoining:
            return None
        return self.starts[0], self.starts[0] + self.total

    def take(self, x: Tensor) -> Tensor:
        """Return rows of ``[T, ...]`` as ``[N, ...]``: a view if there is a span, else a copy."""
        if self.span is None:
            return x.index_select(0, self._indices)
        start, stop = self.span
        if (start, stop) == (0, x.shape[0]):
            return x
        return x[start:stop]

    def put(self, x: Tensor, part: Tensor) -> None:
        """Write ``[N, ...]`` to x ``[T, ...]`` without the padded rows."""
        if self.span is not None:
            x[slice(*self.span)].copy_(part)
        else:
            self.put_tiles(x, part.view(len(self.starts), self.length, *part.shape[1:]), self._blocks)

    def put_tiles(self, x: Tensor, part: Tensor, tiles: Spaced) -> None:
        """Write results ``[B, length, ...]`` of a call's tiles to x ``[T, ...]`` without the padded rows."""
        if self.span is not None:
            tiles.view(self.take(x)).copy_(part)
            return

        real, target = self._targets(tiles)
        part = part.flatten(0, 1)
        if real is not None:
            part = part.index_select(0, real)
        x.index_copy_(0, target, part.to(x.dtype))

    def fill_padding(self, part: Tensor, value: float) -> None:
        """Set the padded rows of ``[N, ...]`` to a value, in place."""
        part.index_fill_(0, self._padded, value)

    def make_indices(self, tiles: Iterable[Spaced]) -> None:
        """Make all index tensors now; made later, between large temporary tensors, they fragment the heap."""
        if self.span is not None:
            return
        _ = self._indices
        _ = self._padded
        for runs in (*tiles, self._blocks):
            self._targets(runs)

    @cached_property
    def _blocks(self) -> Spaced:
        """The blocks as one call's tiles."""
        return Spaced(0, self.length, len(self.starts), self.length)

    @cached_property
    def _indices(self) -> Tensor:
        """The packed row to copy for each of the N rows: for padding, the first one of its block."""
        grid = np.where(self._real, np.arange(self.length), 0) + np.array(self.starts)[:, None]
        return torch.from_numpy(grid.ravel())

    @cached_property
    def _padded(self) -> Tensor:
        """Which of the N rows are padding."""
        return torch.from_numpy(np.flatnonzero(~self._real))

    @cached_property
    def _targets_of(self) -> dict[Spaced, tuple[Tensor | None, Tensor]]:
        return {}

    def _targets(self, tiles: Spaced) -> tuple[Tensor | None, Tensor]:
        """Return the real rows of the tiles (None means all) and their rows in the packed tensor."""
        if tiles not in self._targets_of:
            columns = slice(tiles.start, tiles.start + tiles.length)
            is_real = self._real[:, columns]
            packed_rows = np.array(self.starts)[:, None] + np.arange(self.length)[columns]

            real = None
            if not is_real.all():
                real = torch.from_numpy(np.flatnonzero(is_real))
            self._targets_of[tiles] = (real, torch.from_numpy(packed_rows[is_real]))
        return self._targets_of[tiles]

    @cached_property
    def _real(self) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        """Flags ``[blocks, length]`` of rows that are no padding."""
        lengths = self.lengths
        if lengths is None:
            lengths = (self.length,) * len(self.starts)
        real: np.ndarray[tuple[int, int], np.dtype[np.bool_]] = (
            np.arange(self.length)[None, :] < np.array(lengths)[:, None]
        )
        return real


@dataclass(frozen=True, slots=True)
class Spaced:
    """Runs of a piece's rows, one per tile, of equal length and spacing; they may overlap."""

    start: int
    step: int
    count: int
    length: int

    def view(self, x: Tensor) -> Tensor:
        """Return the runs of ``[N, ...]`` as a view ``[B, length, ...]``; if runs overlap, only read it."""
        strides = x.stride()
        return x.as_strided(
            (self.count, self.length, *x.shape[1:]),
            (self.step * strides[0], *strides),
            x.storage_offset() + self.start * strides[0],
        )

    def add(self, x: Tensor, part: Tensor) -> None:
        """Add ``[B, length, ...]`` to the runs of x; overlapping runs are added in a fixed order."""
        # Slices as wide as the spacing do not overlap, so each is added to all runs at once.
        step = self.length if self.count == 1 else self.step
        for low in range(0, self.length, step):
            width = min(step, self.length - low)
            slices = Spaced(self.start + low, self.step, self.count, width)
            slices.view(x).add_(part if width == self.length else part[:, low : low + width])


@dataclass(frozen=True, slots=True)
class Tiles:
    """Equal tiles for one kernel call, with rows relative to a piece; query i is at key ``i + shift``."""

    q: Spaced
    k: Spaced
    shift: int

    @property
    def rows(self) -> int:
        """The number of queries of a tile."""
        return self.q.length

    @property
    def keys(self) -> int:
        """The number of keys of a tile."""
        return self.k.length

    def sees_all(self, left: int, right: int) -> bool:
        """Return whether every query sees every key."""
        below = left < 0 or left >= self.rows - 1 + self.shift
        above = right < 0 or self.shift + right >= self.keys - 1
        return below and above

    def is_top_left(self, left: int, right: int) -> bool:
        """Return whether query i sees exactly the keys up to i, as with the kernel's causal flag."""
        return self.shift == 0 and right == 0 and (left < 0 or left >= self.rows - 1)


@dataclass(frozen=True, slots=True)
class Piece:
    """Calls on the same rows. If ``once``, every key is in one tile only, and call 0 has all queries."""

    q: Rows
    k: Rows
    calls: tuple[Tiles, ...]
    once: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """All calls of a pack, the ranges of rows in no call, and one call that can replace them all."""

    pieces: tuple[Piece, ...]
    blank_q: tuple[tuple[int, int], ...]
    blank_k: tuple[tuple[int, int], ...]
    at_once: Piece | None = None


@lru_cache(maxsize=32)
def make_plan(
    offsets_q: tuple[int, ...],
    offsets_kv: tuple[int, ...],
    *,
    left: int,
    right: int,
    by_keys: bool = False,
    max_cells: int | None = None,  # the largest rows x keys of a call that stores its scores
    grouped: int = SHORT,  # the longest sequence that may share a padded call
    width: int = 512,  # the number of query heads x head size
) -> Plan:
    """Cut the sequences of a pack into kernel calls; layers with equal options share the cached plan."""
    singles: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
    triangles: list[tuple[int, int]] = []
    pieces: list[Piece] = []
    blank_q: list[tuple[int, int]] = []
    blank_k: list[tuple[int, int]] = []
    cutter = _Cutter(left, right, by_keys, max_cells, width)

    for (q0, q1), (k0, k1) in zip(pairwise(offsets_q), pairwise(offsets_kv), strict=True):
        blind = cutter.blind_rows(q1 - q0, k1 - k0)
        blank_q.append((q0, q0 + blind))
        q0 += blind
        rows = q1 - q0
        keys = k1 - k0
        if rows == 0 or keys == 0:
            blank_k.append((k0, k1))
            continue

        whole = whole_tile(rows, keys, keys - rows)
        if max_cells is None and whole.is_top_left(left, right) and rows <= SHORT and q0 == k0:
            triangles.append((rows, q0))
        elif cutter.takes_whole(whole):
            singles[rows, keys, whole.shift].append((q0, k0))
        else:
            calls, (first_seen, last_seen) = cutter.cut(rows, keys)
            once = by_keys and keys == rows <= COLUMN_ROWS and (left, right) == (-1, 0)
            pieces.append(Piece(Rows((q0,), rows), Rows((k0,), keys), calls, once))
            blank_k += [(k0, k0 + first_seen), (k0 + last_seen, k1)]

    plan = Plan(
        (*pieces, *_equal_groups(singles, max_cells), *_triangles(triangles, grouped, cutter)),
        _nonempty(blank_q),
        _nonempty(blank_k),
    )
    for piece in plan.pieces:
        piece.q.make_indices(call.q for call in piece.calls)
        piece.k.make_indices(call.k for call in piece.calls if by_keys)

    whole_pack = not (pieces or plan.blank_q or plan.blank_k) and max_cells is None
    uncut = all(len(piece.calls) == 1 for piece in plan.pieces)
    if whole_pack and uncut:
        plan = replace(plan, at_once=_one_call(offsets_q, offsets_kv))
    return plan


def whole_tile(rows: int, keys: int, shift: int, *, count: int = 1) -> Tiles:
    """Return the tile of a whole sequence, or the tiles of ``count`` sequences of equal length."""
    return Tiles(Spaced(0, rows, count, rows), Spaced(0, keys, count, keys), shift)


def _one_call(offsets_q: tuple[int, ...], offsets_kv: tuple[int, ...]) -> Piece | None:
    """Return one kernel call for sequences of equal length; None if lengths differ or are 0."""
    q_lengths = {stop - start for start, stop in pairwise(offsets_q)}
    kv_lengths = {stop - start for start, stop in pairwise(offsets_kv)}
    if len(q_lengths) != 1 or len(kv_lengths) != 1:
        return None

    (rows,) = q_lengths
    (keys,) = kv_lengths
    if rows == 0 or keys == 0:
        return None
    return _block(offsets_q[:-1], offsets_kv[:-1], rows, keys, keys - rows)


def _block(q_starts: tuple[int, ...], k_starts: tuple[int, ...], rows: int, keys: int, shift: int) -> Piece:
    """Return one call for sequences of equal length, each as one tile."""
    tiles = whole_tile(rows, keys, shift, count=len(q_starts))
    return Piece(Rows(q_starts, rows), Rows(k_starts, keys), (tiles,), once=True)


@dataclass(frozen=True, slots=True)
class _Cutter:
    """Cuts sequences into tiles for one mask, forward or backward; ``make_plan`` explains its fields."""

    left: int
    right: int
    by_keys: bool
    max_cells: int | None
    width: int

    def blind_rows(self, rows: int, keys: int) -> int:
        """Count the queries at the start of a sequence that see no key; without keys, count all queries."""
        if keys == 0:
            return rows
        if self.right < 0:
            return 0
        return min(rows, max(0, rows - keys - self.right))

    def takes_whole(self, whole: Tiles) -> bool:
        """Return whether a sequence is computed as one tile."""
        if self.max_cells is not None:
            return whole.rows * whole.keys <= min(self.max_cells, SHORT * SHORT)
        if self.right == 0 and whole.is_top_left(self.left, self.right):
            return whole.rows <= SHORT or (not self.by_keys and whole.rows > WHOLE_FORWARD)
        return whole.sees_all(self.left, self.right)

    def cut(self, rows: int, keys: int) -> tuple[tuple[Tiles, ...], tuple[int, int]]:
        """Cut one sequence into tiles; return the calls and the range of keys that queries see."""
        tiles = self._columns(rows, keys) if self.by_keys else self._rows(rows, keys)
        calls: list[Tiles] = []
        for tile in tiles:
            merged = _extend(calls[-1], tile) if calls else None
            if merged is None:
                calls.append(tile)
            else:
                calls[-1] = merged

        low = min(call.k.start for call in calls)
        high = max(call.k.start + call.k.step * (call.k.count - 1) + call.keys for call in calls)
        return tuple(calls), (low, high)

    def cut_triangles(self, rows: int, keys: int, count: int) -> tuple[Tiles, ...]:
        """Cut causal sequences of equal length together; the backward leaves them whole, which is faster."""
        edges = [0, rows] if self.by_keys else self._cheapest_edges(rows, count)
        tiles = []
        for start, stop in pairwise(edges):
            seen = keys if stop == rows else stop  # the last tile also has the keys of padding
            q = Spaced(start, rows, count, stop - start)
            k = Spaced(0, keys, count, seen)
            tiles.append(Tiles(q, k, start))
        return tuple(tiles)

    def _cheapest_edges(self, rows: int, count: int) -> list[int]:
        """Return the cheapest edges for a short sequence: cuts save arithmetic, but add calls."""
        options = [[0, rows]]
        for _, height, _ in TILES:
            edges = [*range(0, rows, height), rows]
            if len(edges) > 2 and rows - edges[-2] <= height // 4:
                del edges[-2]
            options.append(edges)

        def cost(edges: list[int]) -> int:
            cells = sum((stop - start) * stop for start, stop in pairwise(edges))
            return cells * count * self.width + (len(edges) - 1) * CALL_PRODUCTS

        return min(options, key=cost)

    def _rows(self, rows: int, keys: int) -> list[Tiles]:
        """Cut the queries of a sequence; each tile has the keys that its queries see."""
        shift = keys - rows
        height = self._tile_size(keys, forward=True)
        tiles = []
        for start in range(0, rows, height):
            stop = min(start + height, rows)
            low = 0 if self.left < 0 else max(0, start + shift - self.left)
            high = keys if self.right < 0 else min(keys, stop + shift + self.right)
            q = Spaced(start, 1, 1, stop - start)
            k = Spaced(low, 1, 1, high - low)
            tiles.append(Tiles(q, k, start + shift - low))
        return tiles

    def _columns(self, rows: int, keys: int) -> list[Tiles]:
        """Cut the keys of a sequence; each tile has the queries that see its keys."""
        shift = keys - rows
        width = self._tile_size(rows, forward=False)
        # Causal columns that start on the diagonal need no mask tensor. Without a left limit, all queries
        # see the keys before query 0's position, so columns of these keys need no mask either.
        diagonal = max(0, shift)
        unlimited = self.left < 0 and self.max_cells is None
        width_before = COLUMN_ROWS if unlimited else width
        edges = [*range(0, diagonal, width_before), *range(diagonal, keys, width), keys]

        tiles = []
        for start, stop in pairwise(edges):
            low = 0 if self.right < 0 else max(0, start - self.right - shift)
            high = rows if self.left < 0 else min(rows, stop + self.left - shift)
            for first in range(low, high, COLUMN_ROWS):
                last = min(first + COLUMN_ROWS, high)
                q = Spaced(first, 1, 1, last - first)
                k = Spaced(start, 1, 1, stop - start)
                tiles.append(Tiles(q, k, first + shift - start))
        return tiles

    def _tile_size(self, across: int, *, forward: bool) -> int:
        """Choose rows or keys per tile: small tiles waste less at the diagonal, large tiles run faster."""
        reach = across
        if self.left >= 0 and self.right >= 0:
            reach = min(across, self.left + self.right + 1)
        height, width = next((height, width) for limit, height, width in TILES if reach <= limit)
        size = height if forward else width

        if self.max_cells is not None:
            size = min(size, self.max_cells // (reach + size))
        elif forward or self.left >= 0 or self.right > 0:
            size = min(size, MASK_CELLS // (reach + size))
        return max(8, size)


def _extend(group: Tiles, tile: Tiles) -> Tiles | None:
    """Return the group with one more tile; None if shape or spacing differ or the call is full."""
    count = group.q.count
    same_shape = (group.rows, group.keys, group.shift) == (tile.rows, tile.keys, tile.shift)
    full = (count + 1) * max(group.keys, group.rows) > CALL_ROWS
    if full or not same_shape:
        return None

    q_distance = tile.q.start - group.q.start
    k_distance = tile.k.start - group.k.start
    if q_distance <= 0 or k_distance <= 0 or q_distance % count or k_distance % count:
        return None

    q_step = q_distance // count
    k_step = k_distance // count
    if count > 1 and (q_step, k_step) != (group.q.step, group.k.step):
        return None
    q = replace(group.q, step=q_step, count=count + 1)
    k = replace(group.k, step=k_step, count=count + 1)
    return Tiles(q, k, group.shift)


def _nonempty(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Leave out ranges (start, stop) without a row."""
    return tuple((start, stop) for start, stop in ranges if start < stop)


def _equal_groups(
    singles: dict[tuple[int, int, int], list[tuple[int, int]]], max_cells: int | None
) -> list[Piece]:
    """Put sequences of equal length, each one tile, into calls as large as one call may be."""
    cells = CALL_ROWS * SHORT if max_cells is None else max_cells
    pieces = []
    for (rows, keys, shift), starts in singles.items():
        count = max(1, min(CALL_ROWS // max(rows, keys), cells // (rows * keys)))
        for i in range(0, len(starts), count):
            q_starts, k_starts = zip(*starts[i : i + count], strict=True)
            pieces.append(_block(q_starts, k_starts, rows, keys, shift))
    return pieces


def _triangles(triangles: list[tuple[int, int]], grouped: int, cutter: _Cutter) -> list[Piece]:
    """Group short causal sequences into calls; copy those up to ``grouped`` tokens that form no long run."""
    blocks: list[Rows] = []
    others: list[tuple[int, int]] = []
    for run in _runs(triangles):
        length = run[0][0]
        if length <= grouped and 2 * length * len(run) < CALL_ROWS:
            others += run
        else:
            blocks.append(Rows(tuple(start for _, start in run), length))

    pieces = []
    for q in blocks + _padded_groups(others):
        k = q
        if q.span is None and not cutter.by_keys:  # keys are copied anyway, so they can be padded
            k = _whole_vectors(q)
        calls = cutter.cut_triangles(q.length, k.length, len(q.starts))
        pieces.append(Piece(q, k, calls, once=True))
    return pieces


def _whole_vectors(rows: Rows) -> Rows:
    """Pad copied keys to a multiple of KEYS; the kernel's forward computes leftover keys one by one."""
    length = -(-rows.length // KEYS) * KEYS
    if length == rows.length:
        return rows
    lengths = rows.lengths or (rows.length,) * len(rows.starts)
    return Rows(rows.starts, length, lengths)


def _runs(triangles: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Split causal sequences into runs of adjacent sequences of equal length that fit one call."""
    runs: list[list[tuple[int, int]]] = []
    for length, start in triangles:
        last = runs[-1] if runs else []
        fits = (len(last) + 1) * length <= CALL_ROWS
        if last and fits and last[-1] == (length, start - length):
            last.append((length, start))
        else:
            runs.append([(length, start)])
    return runs


def _padded_groups(triangles: list[tuple[int, int]]) -> list[Rows]:
    """Group causal sequences of similar length into padded calls while padding costs less than a call."""
    groups: list[list[tuple[int, int]]] = []
    padded_pairs = 0  # pairs of the last group with one sequence more, padding included
    real_pairs = 0
    for length, start in sorted(triangles, reverse=True):
        if groups:
            longest, _ = groups[-1][0]
            padded_pairs += longest * longest
            real_pairs += length * length
            full = (len(groups[-1]) + 1) * longest > CALL_ROWS
            if not full and padded_pairs <= PADDING * real_pairs + FREE_PAIRS:
                groups[-1].append((length, start))
                continue

        groups.append([(length, start)])
        padded_pairs = length * length
        real_pairs = length * length

    return [_padded_block(group) for group in groups]


def _padded_block(group: list[tuple[int, int]]) -> Rows:
    """Return causal sequences (length, start) as the rows of a padded call, in the order of the pack."""
    longest, _ = group[0]
    lengths, starts = zip(*sorted(group, key=lambda member: member[1]), strict=True)
    return Rows(starts, longest, None if min(lengths) == longest else lengths)
