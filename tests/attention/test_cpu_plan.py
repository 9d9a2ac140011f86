from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_thd.attention.kernels import cpu_plan as plan_module
from lightning_thd.attention.kernels.cpu_plan import Plan, Rows, Spaced, make_plan
from lightning_thd.attention.kernels.cpu_tiles import hidden_pairs

Pair = tuple[int, int]

# Limits at which 40 tokens meet every path.
SMALL_LIMITS = {
    "SHORT": 6,
    "WHOLE_FORWARD": 30,
    "CALL_ROWS": 24,
    "COLUMN_ROWS": 12,
    "TILES": ((8, 4, 4), (1 << 62, 8, 8)),
    "KEYS": 4,
    "CALL_PRODUCTS": 1,
}


def offsets(lengths: list[int]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(lengths, initial=0))


def places(rows: Rows, tiles: Spaced) -> list[list[int | None]]:
    """The packed row of every row of every tile; None for padding."""
    rows_of_tiles: list[int | None] = []
    for start, real in zip(rows.starts, rows.lengths or (rows.length,) * len(rows.starts), strict=True):
        rows_of_tiles += [start + i if i < real else None for i in range(rows.length)]
    starts = [tiles.start + b * tiles.step for b in range(tiles.count)]
    assert min(starts) >= 0
    return [rows_of_tiles[start : start + tiles.length] for start in starts]


def pairs_of(plan: Plan, left: int, right: int) -> list[Pair]:
    """Every (query row, key row) that the calls look at and do not hide, padded queries left out."""
    seen = []
    for piece in plan.pieces:
        for call in piece.calls:
            hidden = hidden_pairs(call.rows, call.keys, call.shift, left=left, right=right)
            if call.sees_all(left, right):
                assert not hidden.any()
            if call.is_top_left(left, right):
                assert hidden.tolist() == [[j > i for j in range(call.keys)] for i in range(call.rows)]
            visible = (~hidden).nonzero().tolist()
            for queries, keys in zip(places(piece.q, call.q), places(piece.k, call.k), strict=True):
                assert (len(queries), len(keys)) == (call.rows, call.keys)
                met = [(queries[i], keys[j]) for i, j in visible if queries[i] is not None]
                assert all(k is not None for _, k in met)  # no real query sees padding
                seen += met

    return seen


def true_pairs(lengths_q: list[int], lengths_kv: list[int], left: int, right: int) -> set[Pair]:
    pairs = set()
    for q0, lq, k0, lk in zip(offsets(lengths_q), lengths_q, offsets(lengths_kv), lengths_kv, strict=False):
        for i in range(lq):
            p = i + lk - lq
            low = 0 if left < 0 else max(0, p - left)
            high = lk if right < 0 else min(lk, p + right + 1)
            pairs |= {(q0 + i, k0 + j) for j in range(low, high)}
    return pairs


def rows_of(plan: Plan, side: str) -> list[int]:
    """Every packed row of queries or keys that a tile has, padding left out, tile by tile."""
    tiles = [
        place for p in plan.pieces for c in p.calls for place in places(getattr(p, side), getattr(c, side))
    ]
    return [row for tile in tiles for row in tile if row is not None]


lengths_lists = st.lists(st.integers(0, 40), min_size=1, max_size=6)
sides = st.tuples(st.sampled_from([-1, 0, 1, 3, 10]), st.sampled_from([-1, 0, 0, 2]))


@given(
    lengths=lengths_lists,
    others=lengths_lists,
    cross=st.booleans(),
    window=sides,
    by_keys=st.booleans(),
    cells=st.sampled_from([None, 1, 64]),
)
@example(lengths=[5, 5, 5], others=[1], cross=False, window=(-1, 0), by_keys=True, cells=None)
@example(lengths=[2], others=[1], cross=True, window=(-1, 0), by_keys=False, cells=None)
@example(lengths=[30, 2], others=[4, 30], cross=True, window=(3, 2), by_keys=False, cells=None)
def test_calls_see_exactly_the_visible_pairs_once(
    lengths: list[int], others: list[int], cross: bool, window: Pair, by_keys: bool, cells: int | None
) -> None:
    lengths_kv = (others * 6)[: len(lengths)] if cross else lengths
    left, right = window

    with pytest.MonkeyPatch.context() as patch:  # small limits, so that 40 tokens meet every path
        for name, limit in SMALL_LIMITS.items():
            patch.setattr(plan_module, name, limit)
        plan = make_plan.__wrapped__(
            offsets(lengths), offsets(lengths_kv), left=left, right=right, by_keys=by_keys, max_cells=cells
        )

    pairs = pairs_of(plan, left, right)
    expected = true_pairs(lengths, lengths_kv, left, right)
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == expected

    blank_q = [row for start, stop in plan.blank_q for row in range(start, stop)]
    blank_k = [row for start, stop in plan.blank_k for row in range(start, stop)]
    assert sorted(blank_q) == sorted(set(range(sum(lengths))) - {i for i, _ in expected})
    if not by_keys and cells is None and not cross:
        assert sorted(rows_of(plan, "q")) == list(range(sum(lengths)))
    if by_keys:  # every key is written: by its tiles, or as a blank
        assert sorted(blank_k + sorted(set(rows_of(plan, "k")))) == list(range(sum(lengths_kv)))

    for piece in plan.pieces if by_keys else ():
        if piece.once:
            keys = rows_of(Plan((piece,), (), ()), "k")
            assert len(keys) == len(set(keys))
            first = piece.calls[0].q
            assert (first.start, first.count * first.length) == (0, piece.q.total)


@pytest.mark.parametrize(
    ("lengths", "left", "by_keys", "most"),
    [
        ([n % 29 + 1 for n in range(512)], -1, False, 3.0),  # padded to share 40 calls
        ([128, 96, 64] * 8, -1, False, 1.52),
        ([512], -1, False, 1.26),
        ([512], -1, True, 1.26),
        ([32768], 1023, False, 1.2),
        ([32768], 1023, True, 1.2),
    ],
)
def test_arithmetic_stays_near_the_visible_pairs(
    lengths: list[int], left: int, by_keys: bool, most: float
) -> None:
    plan = make_plan(offsets(lengths), offsets(lengths), left=left, right=0, by_keys=by_keys)
    computed = sum(c.q.count * c.rows * c.keys for piece in plan.pieces for c in piece.calls)
    visible = sum(n * n / 2 if left < 0 else n * (left + 1) for n in lengths)
    assert len(plan.pieces) < 40
    assert computed <= most * visible


@pytest.mark.parametrize(
    ("lengths_q", "lengths_kv", "window", "by_keys", "once"),
    [
        ([16] * 9, None, (-1, 0), False, True),
        ([16] * 9, None, (-1, 0), True, True),
        ([41] * 3, None, (-1, 0), False, False),  # better cut, as many as fit together
        ([1300] * 2, None, (-1, 0), False, True),
        ([1300] * 2, None, (-1, 0), True, False),
        ([30] * 4, [50] * 4, (-1, -1), True, True),
        ([30] * 4, [50] * 4, (-1, 0), True, False),  # the diagonal does not start at the first key
        ([5] * 4, [3] * 4, (-1, 0), False, False),  # the first queries see nothing
        ([16] * 4, None, (3, 0), False, False),
        ([16, 16, 17, 15], None, (-1, 0), False, False),
        ([16, 0, 16], None, (-1, 0), False, False),
    ],
)
def test_equal_sequences_that_are_not_cut_are_one_call(
    lengths_q: list[int], lengths_kv: list[int] | None, window: Pair, by_keys: bool, once: bool
) -> None:
    left, right = window
    q = offsets(lengths_q)
    kv = offsets(lengths_kv or lengths_q)
    plan = make_plan(q, kv, left=left, right=right, by_keys=by_keys)
    assert (plan.at_once is not None) == once
    if plan.at_once is not None and max(lengths_q) < 1000:  # a million pairs take seconds
        alone = Plan((plan.at_once,), (), ())
        assert sorted(pairs_of(alone, left, right)) == sorted(pairs_of(plan, left, right))
