"""Splits: all layers once, the slowest stage as fast as brute force finds, head and embedding counted."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config

from lightning_thd.flops import FlopsModel, SeqStats
from lightning_thd.parallel.pipeline import LayerCost, split_layers
from lightning_thd.parallel.pipeline.split import layer_flops


@given(
    flops=st.lists(st.integers(1, 50), min_size=4, max_size=9),
    head=st.integers(0, 80),
    stages=st.integers(1, 4),
)
def test_the_slowest_stage_is_as_fast_as_can_be(flops: list[int], head: int, stages: int) -> None:
    split = split_layers([LayerCost(flops=f) for f in flops], ranks=stages, head=LayerCost(flops=head))
    assert [i for stage in range(stages) for i in split.layers(stage)] == list(range(len(flops)))
    assert all(len(split.layers(stage)) for stage in range(stages))

    def slowest(cuts: tuple[int, ...]) -> int:
        work = [sum(flops[start:stop]) for start, stop in pairwise((0, *cuts, len(flops)))]
        return max([*work[:-1], work[-1] + head])

    assert max(split.flops) == min(map(slowest, combinations(range(1, len(flops)), stages - 1)))


def test_a_large_vocabulary_takes_layers_off_the_last_stage() -> None:
    config = Qwen3Config(
        num_hidden_layers=8, hidden_size=64, intermediate_size=128, vocab_size=20_000, head_dim=16
    )
    counted = layer_flops(config, 8, [512, 512])
    assert counted is not None
    layers, before, behind = counted
    stats = SeqStats.from_lengths([512, 512])
    whole = FlopsModel.from_config(config).training_flops(stats).model
    assert sum(layers) + before + behind == whole
    split = split_layers([LayerCost(flops=f) for f in layers], ranks=2, head=LayerCost(flops=behind))
    assert len(split.layers(1)) < len(split.layers(0))
    assert "stage 1 on rank 1: layers" in split.table().splitlines()[-1]


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("auto", "makes 4 stages, but the model has 3 layers"),
        ([1, 2], r"gives 2 stages 3 layers; wanted 4 numbers"),
        ([0, 1, 1, 1], "1 or more that add up to the model's 3 layers"),
    ],
)
def test_what_does_not_fit_is_refused(split: list[int] | str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_layers([LayerCost(flops=1)] * 3, ranks=4, split=split)  # type: ignore[arg-type]
