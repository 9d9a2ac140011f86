from __future__ import annotations

import pickle

import pytest
import torch

from lightning_thd.callbacks import THDFlops
from lightning_thd.flops import FlopsModel, SeqStats
from tests.callbacks.fits import CONFIG

MODEL = FlopsModel.from_config({**CONFIG, "model_type": "mistral", "sliding_window": 4})


def stats(*lengths: int) -> SeqStats:
    return SeqStats.from_lengths(lengths, windows=MODEL.windows)


def flops(*lengths: int) -> int:
    return MODEL.training_flops(stats(*lengths)).model


def test_adds_up_and_resets() -> None:
    metric = THDFlops(MODEL)
    metric.update(stats(3, 5))
    metric.update(stats(9))
    assert metric.compute().dtype == torch.float64
    assert metric.compute() == flops(3, 5) + flops(9)
    metric.reset()
    metric.update(stats(2))
    assert metric.compute() == flops(2)


def test_forward_returns_the_batch_and_keeps_the_sum() -> None:
    metric = THDFlops(MODEL)
    assert metric(stats(3)) == flops(3)
    assert metric(stats(5)) == flops(5)
    assert metric.compute() == flops(3) + flops(5)


def test_flops_that_would_overflow_int64_do_not() -> None:
    metric = THDFlops(FlopsModel.from_config({**CONFIG, "vocab_size": 2**40}))
    huge = SeqStats.from_lengths([2**20])
    for _ in range(4):
        metric.update(huge)
    exact = 4 * metric.model.training_flops(huge).model
    assert exact > 2**63
    assert float(pickle.loads(pickle.dumps(metric)).compute()) == pytest.approx(exact, rel=1e-15)


def test_a_forward_pass_is_a_third() -> None:
    metric = THDFlops(MODEL, work="forward")
    metric.update(stats(3, 5))
    assert 3 * metric.compute() == flops(3, 5)


def test_stats_of_another_model_are_refused() -> None:
    metric = THDFlops(MODEL)
    with pytest.raises(ValueError, match=r"has attention windows \[4\], which the stats do not count"):
        metric.update(SeqStats.from_lengths([3]))
    assert metric.compute() == 0
