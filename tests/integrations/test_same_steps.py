"""The same 40 steps of the quickstart's model and data in every integration: equal losses and parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_thd import Packs, Sequences
from lightning_thd.data import StdlibText
from tests.integrations.engines import ENGINES, Job
from tests.ranks import run_ranks
from tests.tiny import largest_error, sequences, tiny_llama

# fp64: what is left is the order of sums, of microbatches and of ranks.
TOLERANCE = 1e-11


def quickstart_model() -> nn.Module:
    from examples.quickstart import make_model

    torch.manual_seed(0)
    return make_model().double()


def train_in_all(
    engines: list[str], step: Any, accumulate: int, ranks: int, steps: int, whole: bool
) -> dict[str, Any]:
    torch.set_num_threads(2 // ranks if whole else 1)
    job = Job(
        quickstart_model if whole else tiny_llama,
        StdlibText(max_bytes=256) if whole else sequences(60, labels=True),
        capacity=512 if whole else 48,
        step=step,
        accumulate=accumulate,
        ranks=ranks,
        steps=steps,
    )
    return {engine: job.run(engine) for engine in engines}


def same_in_all(step: Any, accumulate: int, ranks: int, *, steps: int, whole: bool) -> None:
    engines = [engine for engine in ENGINES if engine != "trainer" or isinstance(step, Packs)]
    of_ranks = run_ranks(train_in_all, ranks, engines, step, accumulate, ranks, steps, whole, timeout_s=900)
    found = {engine: [rank[engine] for rank in of_ranks] for engine in engines}
    wanted, losses = found["lightning"][0]
    assert len(losses) == steps
    means = [sum(row) / ranks for row in zip(*(rank[1] for rank in found["lightning"]), strict=True)]
    assert not whole or means[-1] < means[0]
    for engine in engines[1:]:
        for parameters, _ in found[engine]:
            assert largest_error(parameters, wanted) < TOLERANCE, engine
        shares = zip(*(rank[1] for rank in found[engine]), strict=True)
        assert [sum(row) / ranks for row in shares] == pytest.approx(means, rel=TOLERANCE), engine


@pytest.mark.parametrize(
    ("step", "accumulate", "ranks"),
    [(Packs(4), 2, 2), (Sequences(12), 1, 1)],
)
def test_six_steps_of_a_tiny_model(step: Any, accumulate: int, ranks: int) -> None:
    same_in_all(step, accumulate, ranks, steps=6, whole=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "accumulate", "ranks"),
    [(Packs(2), 2, 1), (Sequences(8), 1, 1), (Packs(2), 1, 2), (Sequences(8), 1, 2)],
)
def test_forty_steps_of_the_quickstart(step: Any, accumulate: int, ranks: int) -> None:
    same_in_all(step, accumulate, ranks, steps=40, whole=True)
