"""Mixed precision of sharded weights: products in bf16, weights and gradient sums in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_thd import Sequences
from lightning_thd.strategies.shards import policy_of
from tests.ranks import run_ranks
from tests.strategies.jobs import Layout, train

STEP = Sequences(12)


def both(layout: Layout) -> list[dict[str, Any]]:
    ways: list[Any] = ["32-true", "bf16-mixed"]
    return [train("qwen3", layout, STEP, torch.float32, {"precision": way}) for way in ways]


@pytest.mark.parametrize(
    "layout",
    [Layout(dp=2), pytest.param(Layout(cp=2, tp=2), marks=pytest.mark.slow)],
    ids=["dp2", "cp2tp2"],
)
def test_bf16_mixed(layout: Layout) -> None:
    for exact, mixed in run_ranks(both, layout.world, layout):
        assert all(value.dtype == torch.float32 for value in mixed["params"].values())
        # bf16 keeps 8 bits: the mean of some 70 losses near 4 agrees to a few parts in 1000.
        assert mixed["losses"] == pytest.approx(exact["losses"], rel=1e-2)
        assert mixed["losses"] != exact["losses"]


def test_fp16_scaling_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="'16-mixed' scales the loss.*Use 'bf16-mixed'"):
        policy_of("16-mixed")
