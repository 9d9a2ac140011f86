from __future__ import annotations

import pytest
import torch

from lightning_thd.loss.tiles.budget import stash_shape, tile_shape
from lightning_thd.loss.tiles.logits import LogitMap

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_documented_values() -> None:
    assert tile_shape(8192, 32_000, device=CPU, itemsize=4, chunk="auto") == (1024, 2048)
    kept = {"device": CPU, "itemsize": 4, "kept_itemsize": 4}
    assert stash_shape(8192, 32_000, **kept, chunk="auto")[0] == 512
    assert stash_shape(8192, 151_936, **kept, chunk="auto")[0] == 256
    assert stash_shape(8192, 32_000, **kept, chunk=16)[0] == 16


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 10**6), (10**6, 3), (0, 5), (5, 0)])
def test_two_tiles_fit_their_budget_and_are_never_empty(
    device: torch.device, rows: int, columns: int
) -> None:
    c, v = tile_shape(rows, columns, device=device, itemsize=4, chunk="auto")
    assert min(c, v) >= 1
    assert 2 * 4 * c * v <= 256 * 2**20
    assert min(stash_shape(rows, columns, device=device, itemsize=4, kept_itemsize=2, chunk="auto")) >= 1


def test_a_chunk_is_taken_as_given() -> None:
    assert tile_shape(8192, 32_000, device=CPU, itemsize=4, chunk=16)[0] == 16


def test_logit_map_applies_cap_before_temperature() -> None:
    x = torch.linspace(-9, 9, 7, dtype=torch.float64)
    capped = LogitMap(scale=2.0, softcap=5.0, temperature=0.5).apply_(x.clone())
    torch.testing.assert_close(capped, torch.tanh(x * 2 / 5) * 5 / 0.5)
    torch.testing.assert_close(LogitMap(scale=2.0, temperature=4.0).apply_(x.clone()), x / 2)
    with pytest.raises(ValueError, match="softcap=inf"):
        LogitMap(softcap=float("inf"))
