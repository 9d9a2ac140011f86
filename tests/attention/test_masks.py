from __future__ import annotations

import torch

from lightning_thd.attention.kernels.cpu_plan import Spaced, Tiles
from lightning_thd.attention.kernels.cpu_tiles import Masks, hidden_pairs
from lightning_thd.attention.spec import make_spec


def tile(rows: int, keys: int, shift: int, *, at: int = 0) -> Tiles:
    return Tiles(Spaced(at, rows, 1, rows), Spaced(at, keys, 1, keys), shift)


def test_hidden_pairs_worked_values() -> None:
    assert hidden_pairs(2, 2, 0, left=-1, right=0).tolist() == [[False, True], [False, False]]
    assert hidden_pairs(2, 3, 1, left=0, right=-1).tolist() == [[True, False, False], [True, True, False]]
    assert not hidden_pairs(3, 3, 0, left=-1, right=-1).any()


def test_masks_hide_exactly_the_hidden_pairs_in_any_order_of_asking() -> None:
    spec = make_spec(8)
    shapes = [(4, 4), (2, 9), (8, 8), (3, 20), (8, 64), (1, 5), (256, 256), (9, 300), (300, 301)]
    for order in (shapes, shapes[::-1]):
        masks = Masks(spec, torch.float32)
        for rows, keys in order:
            mask = masks.of(tile(rows, keys, keys - rows))
            if mask is None:
                assert rows == 1
                continue
            assert mask.shape == (rows, keys)
            hidden = hidden_pairs(rows, keys, keys - rows, left=-1, right=0)
            assert torch.equal(mask == -torch.inf, hidden)
            assert torch.equal(mask == 0, ~hidden)


def test_a_window_mask_is_made_once_a_geometry() -> None:
    masks = Masks(make_spec(8, window=3), torch.float64)
    tiles = tile(4, 6, 2)
    first = masks.of(tiles)
    assert first is not None
    assert first.dtype == torch.float64
    assert masks.of(tile(4, 6, 2, at=9)) is first
    assert torch.equal(first == -torch.inf, hidden_pairs(4, 6, 2, left=2, right=0))


def test_a_causal_mask_hides_padded_keys() -> None:
    for rows, keys, shift in ((3, 8, 0), (6, 16, 4), (40, 256, 200), (9, 300, 40)):
        mask = Masks(make_spec(8), torch.float32).of(tile(rows, keys, shift))
        assert mask is not None
        assert torch.equal(mask == -torch.inf, hidden_pairs(rows, keys, shift, left=-1, right=0))
