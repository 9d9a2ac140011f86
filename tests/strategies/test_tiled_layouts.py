"""MLPs in tiles of tokens under FSDP2 and tensor parallelism: the weights of one process without tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_thd import Sequences
from lightning_thd.models import prepare
from lightning_thd.models.tiles import tile_of
from tests.ranks import run_ranks
from tests.strategies.jobs import Job, Layout, train, train_by_hand
from tests.tiny import largest_error


class TiledJob(Job):
    """A module whose MLPs run in tiles, which the strategy's own calls of ``prepare`` keep."""

    def __init__(self, family: str = "qwen3", dtype: torch.dtype = torch.float64) -> None:
        super().__init__(family, dtype)
        prepare(self.model, mlp_tile=16)

    def on_train_end(self) -> None:
        assert tile_of(self.model) == 16


def train_tiled(family: str, layouts: list[Layout]) -> list[dict[str, Any]]:
    return [train(family, layout, Sequences(12), kind=TiledJob) for layout in layouts]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_parameters_equal_one_process_without_tiles(family: str) -> None:
    layouts = [Layout(dp=2), Layout(tp=2), Layout(tp=2, options={"sequence_parallel": True})]
    ranks = run_ranks(train_tiled, 2, family, layouts)
    for index, layout in enumerate(layouts):
        expected = train_by_hand(family, layout, Sequences(12))
        for of_rank in ranks:
            assert largest_error(of_rank[index]["params"], expected["params"]) < 1e-10, layout
