"""A model with latent attention (MLA), trained on shards, has the parameters of one process."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.alignment import Alignment
from lightning_thd.parallel.shard import shard_batch
from tests.models.families import FAMILIES
from tests.ranks import run_ranks
from tests.tiny import largest_error

STEPS = 2
LENGTHS = (3, 40, 1, 17, 3)
LAYOUTS = ("contiguous", "dual_chunk", "mixed", "striped")
WAYS = ("needed", "ulysses", "ring", "all_gather")


def build() -> nn.Module:
    chosen = FAMILIES["deepseek_v3"]
    # Experts are left out: their router computes in fp32 whatever the model's dtype.
    config = getattr(transformers, chosen.config)(**{**chosen.arguments, "first_k_dense_replace": 2})
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="thd")
    return model.double().train()


def train(layout: Any = None, way: Any = "auto") -> dict[str, Tensor]:
    """Train on this rank's shards, or on whole packs."""
    model = build()
    group = dist.group.WORLD
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    for step in range(STEPS):
        rows = [{"input_ids": (torch.arange(n) * 7 + step) % 60 + 1} for n in LENGTHS]
        align = None if layout is None else Alignment.for_(cp=group.size(), layout=layout)
        batch = THDBatch.collate(rows, align=align)
        if layout is not None:
            batch = shard_batch(batch, group=group, layout=layout, communication=way)
        optimizer.zero_grad()
        causal_lm_loss(model, batch).backward()
        for parameter in model.parameters() if layout is not None else ():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= group.size()
        optimizer.step()

    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def compare(ways: list[tuple[str, str]]) -> float:
    warnings.filterwarnings("ignore")
    expected = train()
    return max(largest_error(train(layout, way), expected) for layout, way in ways)


@pytest.mark.parametrize(
    ("cp", "ways"),
    [
        (2, [("contiguous", "needed"), ("mixed", "ulysses"), ("striped", "ring")]),
        pytest.param(4, list(product(LAYOUTS, WAYS)), marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_parameters_are_those_of_one_process(cp: int, ways: list[tuple[str, str]]) -> None:
    assert max(run_ranks(compare, cp, ways)) < 1e-10  # fp64: other orders of the same sums
