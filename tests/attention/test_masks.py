from __future__ import annotations

import torch

from lightning_thd.attention.kernels.masks import Masks, hidden_pairs
from lightning_thd.attention.kernels.plan import Tiles
from lightning_thd.attention.spec import make_spec


def test_hidden_pairs_worked_values() -> None:
    assert hidden_pairs(2, 2, 0, left=-1, right=0).tolist() == [[False, True], [False, False]]
    assert hidden_pairs(2, 3, 1, left=0, right=-1).tolist() == [[True, False, False], [True, True, False]]
    assert not hidden_pairs(3, 3, 0, left=-1, right=-1).any()


def test_masks_hide_exactly_the_hidden_pairs_in_any_order_of_asking() -> None:
    spec = make_spec(8)
    shapes = [(4, 4), (2, 9), (8, 8), (3, 20), (8, 64), (1, 5)]
    for order in (shapes, shapes[::-1]):
        masks = Masks(spec, torch.float32)
        for rows, keys in order:
            mask = masks.of(Tiles(rows, keys, keys - rows, (0,), (0,)))
            if mask is None:
                assert rows == 1
                continue
            assert mask.shape == (rows, keys)
            hidden = hidden_pairs(rows, keys, keys - rows, left=-1, right=0)
            assert torch.equal(mask == -torch.inf, hidden)
            assert torch.equal(mask == 0, ~hidden)


def test_a_window_mask_is_made_once_a_geometry() -> None:
    masks = Masks(make_spec(8, window=3), torch.float64)
    tiles = Tiles(4, 6, 2, (0,), (0,))
    first = masks.of(tiles)
    assert first is not None
    assert first.dtype == torch.float64
    assert masks.of(Tiles(4, 6, 2, (9,), (7,))) is first
    assert torch.equal(first == -torch.inf, hidden_pairs(4, 6, 2, left=2, right=0))
