"""Accelerate and Fabric loops whose ranks share packs equal the hand-written loop over whole sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_thd import Packs, Sequences, THDDataModule
from lightning_thd.precision import convert_linear
from lightning_thd.strategies.pack_cut import share_packs
from tests.integrations.support import (
    CAPACITY,
    STEPS,
    by_hand,
    check_ranks,
    make_data,
    make_loop,
    mean_nll,
    run,
)
from tests.ranks import pretended_ranks, run_ranks
from tests.tiny import sequences, tiny_llama


def trained(engine: str, step: Any, options: dict[str, Any]) -> Any:
    _, loop = make_loop(engine, step, **options)
    params, losses, seen = run(loop, STEPS)
    val = THDDataModule(capacity=CAPACITY, val=sequences(20, labels=True, seed=5))
    return params, losses, seen, loop.evaluate(val)


@pytest.mark.parametrize(
    ("engine", "world", "step", "options"),
    [
        ("accelerate", 4, Sequences(12), {}),
        ("fabric", 2, Packs(1), {"layout": "striped", "communication": "ring"}),
        pytest.param("accelerate", 2, Sequences(12), {"communication": "needed"}, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_packs_equal_the_hand_loop(
    engine: str, world: int, step: Any, options: dict[str, Any]
) -> None:
    settings = {f"context_parallel_{name}": value for name, value in {"size": 2, **options}.items()}
    ranks = run_ranks(trained, world, engine, step, settings)
    check_ranks(ranks, *by_hand(step, world // 2), 1e-12)
    for params, _, _, logged in ranks:
        loss, tokens = mean_nll(sequences(20, labels=True, seed=5), params=params)
        assert logged == {"val/loss": pytest.approx(loss, rel=1e-12), "val/loss_tokens": tokens}
    for first, second in zip(ranks[::2], ranks[1::2], strict=True):
        assert first[1:3] == second[1:3]  # the same packs and their loss
    assert world == 2 or ranks[0][2] != ranks[-1][2]


def refusals() -> None:
    step: Any = Sequences(12)
    with pytest.raises(ValueError, match="context_parallel_size=3 does not divide the 2 ranks"):
        make_loop("accelerate", step, context_parallel_size=3)
    with pytest.raises(TypeError, match="context_parallel_size is a str, 'dynamic'.*THDDDPStrategy"):
        make_loop("accelerate", step, context_parallel_size="dynamic")
    two: Any = {"context_parallel_size": 2}
    ready = make_data(step)
    ready.attach()
    ready.setup("fit")
    with pytest.raises(ValueError, match="context_parallel_size=2, but the given THDLoader was planned"):
        make_loop("accelerate", step, data=ready.train_steps(), **two)
    _, loop = make_loop("accelerate", step, **two)
    with pytest.raises(ValueError, match=r"capture\(\) with context_parallel_size=2"):
        loop.capture()
    blind = torch.nn.Sequential(torch.nn.Embedding(64, 8), torch.nn.Linear(8, 64))

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch.input_ids), batch.targets, ignore_index=-100)

    _, loop = make_loop("accelerate", step, model=blind, loss_fn=loss_fn, needs_boundaries=False, **two)
    with pytest.raises(MisconfigurationException, match="without calling varlen_attention"):
        loop.backward(next(iter(loop.loader)))
    other: Any = tiny_llama()
    other.set_attn_implementation("sdpa")
    with pytest.raises(MisconfigurationException, match=r"'sdpa'\) sees only the shard"):
        make_loop("accelerate", step, model=other, **two)


def test_refusals() -> None:
    run_ranks(refusals, 2)
    how: Any = {"device": torch.device("cpu"), "size": 2, "layout": "dual_chunk", "communication": "auto"}
    model = tiny_llama()
    with pretended_ranks(4):
        with pytest.raises(
            ValueError,
            match="=2, but 2 of 4 processes read different data: other axes of the mesh share weights",
        ):
            share_packs(model, data=(0, 2, None), **how)
        convert_linear(model.float(), engine="torchao", emulate=True)
        with pytest.raises(ValueError, match="=2 with a model in FP8, whose packs are aligned for one rank"):
            share_packs(model, data=(0, 4, None), **how)
