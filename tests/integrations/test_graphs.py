"""Graphs in loops without a Trainer, on the backend that records operators: the hand loop's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from lightning_thd import Packs, Sequences
from lightning_thd.cuda_graph.recording import RecordingBackend
from tests.integrations.support import STEPS, by_hand, check_ranks, make_loop, run
from tests.ranks import run_ranks


def train(engine: str, step: Any, accumulate: int, max_sequences: Any) -> Any:
    _, loop = make_loop(engine, step, accumulate)
    graphed = loop.capture(max_sequences=max_sequences, backend=RecordingBackend())
    assert graphed is not None
    params, losses, _ = run(loop, STEPS)
    return params, losses, graphed.stats.replays, dict(graphed.stats.fallbacks)


@pytest.mark.parametrize(
    ("engine", "step", "accumulate", "ranks", "max_sequences"),
    [
        ("fabric", Packs(3), 3, 1, "auto"),
        ("accelerate", Sequences(12), 1, 2, "auto"),
        ("accelerate", Sequences(12), 1, 1, (3, 5)),  # what fits no graph runs eagerly
    ],
)
def test_replayed_loops_equal_the_hand_loop(
    engine: str, step: Any, accumulate: int, ranks: int, max_sequences: Any
) -> None:
    of_ranks = run_ranks(train, ranks, engine, step, accumulate, max_sequences)
    expected, losses = by_hand(step, ranks)
    check_ranks(of_ranks, expected, losses, 1e-12)
    for _, _, replays, fallbacks in of_ranks:
        assert replays > STEPS // 2 or fallbacks["num_sequences"] > 0
        assert replays + sum(fallbacks.values()) >= STEPS


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler looks at it
def test_a_loop_with_compiled_layers_equals_the_hand_loop() -> None:
    made = counters["stats"]["unique_graphs"]
    _, loop = make_loop("fabric", Packs(1), 1)
    graphed = loop.capture(max_sequences=24, backend=RecordingBackend(), compile_layers=True)
    assert graphed is not None
    params, losses, _ = run(loop, STEPS)
    expected, wanted_losses = by_hand(Packs(1), 1)
    check_ranks([(params, losses)], expected, wanted_losses, 1e-12)
    assert graphed.stats.replays > 0
    assert counters["stats"]["unique_graphs"] > made


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_training_goes_on_or_says_why() -> None:
    _, loop = make_loop("fabric", Sequences(12))
    assert loop.capture() is None
    with pytest.raises(
        ValueError, match=r"capture\(require=True\), but there is no CUDA device. Leave require out"
    ):
        loop.capture(require=True)
    with pytest.raises(ValueError, match="max_sequences=0: wanted 'auto', a number of sequences"):
        loop.capture(max_sequences=0)


def test_a_stream_has_no_graphs() -> None:
    _, loop = make_loop("fabric", Sequences(12))
    loop.loader.planner = None  # as for a stream
    with pytest.raises(ValueError, match="but the loader reads a stream, which cannot list"):
        loop.capture(require=True, backend=RecordingBackend())
