"""The same steps of the same model and data in every integration: equal losses and parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_thd import Packs, Sequences
from tests.integrations.engines import ENGINES, Job
from tests.ranks import run_ranks
from tests.tiny import largest_error, sequences, tiny_llama

# fp64: what is left is the order of sums, of microbatches and of ranks.
TOLERANCE = 1e-11
STEPS = 6


def train_in_all(engines: list[str], step: Any, accumulate: int, ranks: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    samples = sequences(60, labels=True)
    how: Any = {"capacity": 48, "step": step, "accumulate": accumulate, "ranks": ranks, "steps": STEPS}
    job = Job(tiny_llama, samples, **how)
    return {engine: job.run(engine) for engine in engines}


@pytest.mark.parametrize(
    ("step", "accumulate", "ranks"),
    [
        (Packs(4), 2, 2),
        (Sequences(12), 1, 1),
        pytest.param(Packs(2), 2, 1, marks=pytest.mark.slow),
        pytest.param(Sequences(12), 1, 2, marks=pytest.mark.slow),
    ],
)
def test_the_same_steps(step: Any, accumulate: int, ranks: int) -> None:
    engines = [engine for engine in ENGINES if engine != "trainer" or isinstance(step, Packs)]
    of_ranks = run_ranks(train_in_all, ranks, engines, step, accumulate, ranks, timeout_s=900)
    by_engine = {engine: [rank[engine] for rank in of_ranks] for engine in engines}
    expected, losses = by_engine["lightning"][0]
    assert len(losses) == STEPS
    means = [sum(row) / ranks for row in zip(*(rank[1] for rank in by_engine["lightning"]), strict=True)]
    for engine in engines[1:]:
        for parameters, _ in by_engine[engine]:
            assert largest_error(parameters, expected) < TOLERANCE, engine
        shares = zip(*(rank[1] for rank in by_engine[engine]), strict=True)
        assert [sum(row) / ranks for row in shares] == pytest.approx(means, rel=TOLERANCE), engine
