"""FLOPs of models without a config: exact for any order of packs, and never a change of the training."""

from __future__ import annotations

import random

import pytest

from lightning_thd.callbacks import THDThroughputMonitor
from tests.callbacks.own_models import Own, packs

ORDERS = 5


def counted_and_brute(seed: int, order: int) -> tuple[float, int]:
    """Train a random model on packs in some order; return its total FLOPs as logged and as counted."""
    model = Own(seed)
    batches = packs(seed, 12)  # more than are counted
    random.Random(order).shuffle(batches[1:] if order == 0 else batches)
    monitor = THDThroughputMonitor(peak=1e12, causal="exact", every_n_steps=2)
    monitor.watch(model)
    for batch in batches:
        with monitor.step(batch):
            model(batch).backward()
    total = monitor.finish()["train/total_flops"]
    return total, sum(model.count(batch.lengths) for batch in batches)


@pytest.mark.parametrize("seed", [0, 3, 7, 12])
def test_random_models_count_exactly(seed: int) -> None:
    for order in range(2):
        total, brute = counted_and_brute(seed, order)
        # These models are so small that the rounding to whole FLOPs, once a step, shows beside 1e-6.
        assert total == pytest.approx(brute, rel=1e-6, abs=2), (seed, order)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_every_random_model_counts_exactly_in_every_order(seed: int) -> None:
    for order in range(ORDERS):
        total, brute = counted_and_brute(seed, order)
        # These models are so small that the rounding to whole FLOPs, once a step, shows beside 1e-6.
        assert total == pytest.approx(brute, rel=1e-6, abs=2), (seed, order)
