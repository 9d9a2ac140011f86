"""Graphs in loops without a Trainer, on the backend that records operators: the hand loop's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_thd import Packs, Sequences
from lightning_thd.cuda_graph.recording import RecordingBackend
from tests.integrations.support import STEPS, by_hand, make_loop, run, same
from tests.ranks import run_ranks


def train(engine: str, step: Any, accumulate: int, max_sequences: Any) -> Any:
    _, loop = make_loop(engine, step, accumulate)
    graphed = loop.capture(max_sequences=max_sequences, backend=RecordingBackend())
    assert graphed is not None
    params, losses, _ = run(loop, STEPS)
    return params, losses, graphed.stats.replays, dict(graphed.stats.fallbacks), loop.latest


@pytest.mark.parametrize(
    ("engine", "step", "accumulate", "ranks"),
    [("fabric", Packs(3), 3, 1), ("accelerate", Sequences(12), 1, 2)],
)
def test_replayed_loops_equal_the_hand_loop(engine: str, step: Any, accumulate: int, ranks: int) -> None:
    found = run_ranks(train, ranks, engine, step, accumulate, "auto")
    wanted, losses = by_hand(step, ranks)
    for params, _, replays, _, _ in found:
        assert replays > STEPS // 2
        assert same(params, wanted)
    means = [sum(shares) / ranks for shares in zip(*(rank[1] for rank in found), strict=True)]
    assert means == pytest.approx(losses, rel=1e-12)


def test_what_fits_no_graph_runs_eagerly_and_is_counted() -> None:
    [(params, _, replays, fallbacks, _)] = run_ranks(train, 1, "accelerate", Sequences(12), 1, (3, 5))
    assert fallbacks["num_sequences"] > 0
    assert replays + sum(fallbacks.values()) >= STEPS
    assert same(params, by_hand(Sequences(12), 1)[0])


def refuse_all() -> list[Any]:
    return [refuse(kind) for kind in ("plain", "require", "number")]


def refuse(kind: str) -> Any:
    _, loop = make_loop("accelerate", Sequences(12))
    try:
        if kind == "number":
            loop.capture(max_sequences=0)
        return loop.capture(require=kind == "require")
    except ValueError as err:
        return str(err)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_training_goes_on_or_says_why() -> None:
    [(plain, require, number)] = run_ranks(refuse_all, 1)
    assert plain is None
    assert require.startswith("capture(require=True), but there is no CUDA device. Leave require out")
    assert number.startswith("max_sequences=0: wanted 'auto', a number of sequences")
