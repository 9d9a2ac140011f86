"""Ranks that run the same tokens draw the same random numbers, whatever their own streams hold."""

from __future__ import annotations

import torch

from lightning_thd.parallel.draws import SharedDraws


def drawn(seed: int, place: int, microbatches: int) -> list[torch.Tensor]:
    draws = SharedDraws(seed, place)
    found = []
    for _ in range(microbatches):
        with draws.microbatch():
            found.append(torch.rand(4))
    return found


def test_a_stream_is_its_seed_place_and_microbatch_alone() -> None:
    torch.manual_seed(1)
    first = drawn(5, 0, 3)
    torch.manual_seed(2)
    torch.rand(7)
    assert torch.equal(torch.stack(drawn(5, 0, 3)), torch.stack(first))
    others = [*first, *drawn(5, 1, 3), *drawn(6, 0, 3)]
    assert len({tuple(row.tolist()) for row in others}) == 9


def test_the_global_stream_goes_on_as_if_nothing_had_been_drawn() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    drawn(5, 0, 2)
    assert torch.equal(torch.rand(4), wanted)
