from __future__ import annotations

import pytest
import torch

from lightning_thd.attention.kernels import rows

CASES = [
    ((0,), 3, None),
    ((2, 5, 8), 3, None),  # even and adjoining
    ((0, 2, 4), 4, None),  # even and overlapping
    ((1, 9, 4), 3, None),  # uneven
    ((7, 4, 1), 2, None),  # even, backwards
    ((0, 6, 9), 4, (4, 2, 3)),  # padded
]


def contents(starts: tuple[int, ...], length: int, lengths: tuple[int, ...] | None) -> list[list[int]]:
    real = lengths or [length] * len(starts)
    return [[s + i if i < n else s for i in range(length)] for s, n in zip(starts, real, strict=True)]


@pytest.mark.parametrize(("starts", "length", "lengths"), CASES)
@pytest.mark.parametrize("strided", [False, True])
def test_take(starts: tuple[int, ...], length: int, lengths: tuple[int, ...] | None, strided: bool) -> None:
    x = torch.arange(24.0).view(12, 2)
    if strided:
        x = x.t().contiguous().t()
    wanted = torch.stack([x[part] for part in contents(starts, length, lengths)])
    assert torch.equal(rows.take(x, starts, length, lengths), wanted)


@pytest.mark.parametrize(("starts", "length", "lengths"), [case for case in CASES if case[0] != (0, 2, 4)])
def test_put_undoes_take_and_touches_nothing_else(
    starts: tuple[int, ...], length: int, lengths: tuple[int, ...] | None
) -> None:
    x = torch.randn(12, 2, 3)
    y = torch.full_like(x, 7.0)
    rows.put(y, rows.take(x, starts, length, lengths), starts, lengths)
    touched = {s + i for s, n in zip(starts, lengths or [length] * 3, strict=False) for i in range(n)}
    for row in range(12):
        assert torch.equal(y[row], x[row] if row in touched else torch.full((2, 3), 7.0))


@pytest.mark.parametrize(("starts", "length", "lengths"), [case for case in CASES if case[2] is None])
def test_add_sums_overlaps(starts: tuple[int, ...], length: int, lengths: None) -> None:
    part = torch.randn(len(starts), length, 2)
    x = torch.zeros(12, 2)
    rows.add(x, part, starts)
    wanted = torch.zeros(12, 2)
    for b, start in enumerate(starts):
        for i in range(length):
            wanted[start + i] += part[b, i]
    torch.testing.assert_close(x, wanted)


def test_fill_padding() -> None:
    part = torch.zeros(2, 3, 1)
    rows.fill_padding(part, (3, 1), 5.0)
    assert part[..., 0].tolist() == [[0.0, 0.0, 0.0], [0.0, 5.0, 5.0]]


def test_a_view_where_the_spacing_is_even() -> None:
    x = torch.zeros(12, 2)
    assert rows.take(x, (0, 4, 8), 4).data_ptr() == x.data_ptr()
