from __future__ import annotations

import pytest
import torch

from lightning_thd.attention.kernels.cpu_plan import Rows, Spaced

CASES = [
    Rows((0,), 3),
    Rows((2, 5, 8), 3),  # side by side
    Rows((1, 9, 4), 3),  # uneven
    Rows((7, 4, 1), 2),  # even, backwards
    Rows((0, 4, 8), 3),  # even, with gaps
    Rows((0, 6, 9), 4, (4, 2, 3)),  # padded
]


def contents(rows: Rows) -> list[list[int]]:
    real = rows.lengths or [rows.length] * len(rows.starts)
    return [
        [s + i if i < n else s for i in range(rows.length)] for s, n in zip(rows.starts, real, strict=True)
    ]


def touched(rows: Rows) -> set[int]:
    real = rows.lengths or [rows.length] * len(rows.starts)
    return {s + i for s, n in zip(rows.starts, real, strict=True) for i in range(n)}


@pytest.mark.parametrize("rows", CASES)
@pytest.mark.parametrize("strided", [False, True])
def test_take(rows: Rows, strided: bool) -> None:
    x = torch.arange(24.0).view(12, 2)
    if strided:
        x = x.t().contiguous().t()
    assert torch.equal(rows.take(x), torch.cat([x[part] for part in contents(rows)]))
    assert rows.total == len(rows.take(x))


@pytest.mark.parametrize("rows", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_put_undoes_take_and_touches_nothing_else(rows: Rows, dtype: torch.dtype) -> None:
    x = torch.randn(12, 2, 3)
    y = torch.full_like(x, 7.0)
    rows.put(y, rows.take(x).to(dtype))
    for row in range(12):
        assert torch.equal(y[row], x[row] if row in touched(rows) else torch.full((2, 3), 7.0))


@pytest.mark.parametrize("rows", CASES)
def test_runs_of_every_block_are_put_one_by_one(rows: Rows) -> None:
    x = torch.randn(12, 2, 3)
    y = torch.full_like(x, 7.0)
    for start, length in ((0, 1), (1, rows.length - 1)):
        tiles = Spaced(start, rows.length, len(rows.starts), length)
        rows.put_tiles(y, tiles.view(rows.take(x)).clone(), tiles)
    for row in range(12):
        assert torch.equal(y[row], x[row] if row in touched(rows) else torch.full((2, 3), 7.0))


@pytest.mark.parametrize(
    "tiles", [Spaced(0, 4, 3, 4), Spaced(1, 2, 3, 5), Spaced(2, 1, 1, 4), Spaced(0, 3, 2, 2)]
)
def test_add_sums_overlaps(tiles: Spaced) -> None:
    part = torch.randn(tiles.count, tiles.length, 2)
    x, wanted = torch.zeros(12, 2), torch.zeros(12, 2)
    tiles.add(x, part)
    for b in range(tiles.count):
        for i in range(tiles.length):
            wanted[tiles.start + b * tiles.step + i] += part[b, i]
    torch.testing.assert_close(x, wanted)


def test_fill_padding() -> None:
    part = torch.zeros(6, 1)
    Rows((0, 3), 3, (3, 1)).fill_padding(part, 5.0)
    assert part[:, 0].tolist() == [0.0, 0.0, 0.0, 0.0, 5.0, 5.0]


def test_a_view_where_blocks_lie_side_by_side() -> None:
    x = torch.zeros(12, 2)
    assert Rows((0, 4, 8), 4).take(x) is x
    assert Rows((4, 8), 4).take(x).data_ptr() == x[4:].data_ptr()
    assert Spaced(4, 4, 2, 3).view(x).data_ptr() == x[4:].data_ptr()
