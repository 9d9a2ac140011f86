"""Costs measured on the device become the choice of buckets, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.callbacks.cuda_graph import GraphCosts
from lightning_thd.cuda_graph.capture.recording import RecordingBackend
from lightning_thd.cuda_graph.capture.subject import Example, Subject
from lightning_thd.cuda_graph.choice.measuring import measured_costs
from tests.callbacks.test_cuda_graph import callback, fit
from tests.cuda_graph.support import random_batch
from tests.ranks import run_ranks
from tests.tiny import tiny_llama


class Stopwatch(RecordingBackend):
    """Eager takes 1 s on rank 0, twice that on rank 1; a replay half of it, and 10 ms a sequence.

    Args:
        sequences: of the buckets, in the order in which they are measured.
    """

    def __init__(self, *sequences: int) -> None:
        super().__init__()
        self.sequences = list(sequences)
        self.times = 0
        self.released = 0

    def time_s(self, function: Callable[[], object]) -> float | None:
        function()
        self.times += 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        if self.times % 2 == 0:  # the first asks whether times mean anything; then eager and replay in turns
            return 1.0 + rank
        return (0.5 + 0.01 * (self.sequences.pop(0) if self.sequences and self.times > 1 else 0)) * (1 + rank)

    def release(self) -> None:
        self.released += 1


def measure(function: Any = causal_lm_loss, backend: RecordingBackend | None = None) -> GraphCosts | None:
    needs = np.array([5, 6, 8, 12], dtype=np.int64)
    # The median of the needs, and the largest: at least twice as many, or no line goes through them.
    backend = Stopwatch(14, 7) if backend is None else backend
    batch = random_batch(1, count=4)
    subject = Subject(function=function, module=tiny_llama(torch.float64), backend=backend)
    return measured_costs(subject, Example(batch), needs=needs, slots=128, max_seqlen=24)


def test_the_line_through_two_buckets() -> None:
    backend = Stopwatch(14, 7)
    costs = measure(backend=backend)
    assert costs is not None
    assert costs.eager == pytest.approx(1.0)
    assert costs.graph == pytest.approx(0.5)
    assert costs.per_sequence == pytest.approx(0.01)
    assert backend.released == 2  # each before the next is captured


def test_a_backend_without_times_and_a_step_without_graphs_have_no_costs() -> None:
    def reads(module: nn.Module, batch: THDBatch) -> Tensor:
        loss = causal_lm_loss(module, batch)
        return loss * loss.item()

    assert measure(backend=RecordingBackend()) is None
    backend = Stopwatch(14, 7)
    assert measure(reads, backend) is None
    assert backend.released == 1


def on_ranks() -> GraphCosts | None:
    return measure()


def one_cannot() -> GraphCosts | None:
    def reads(module: nn.Module, batch: THDBatch) -> Tensor:
        loss = causal_lm_loss(module, batch)
        return loss * loss.item() if dist.get_rank() else loss

    return measure(reads)


@pytest.mark.slow
def test_all_ranks_reckon_with_the_costs_of_the_first_and_none_where_one_cannot() -> None:
    first, second = run_ranks(on_ranks, 2)
    assert first == second
    assert first.eager == pytest.approx(1.0)
    assert run_ranks(one_cannot, 2) == [None, None]


def test_auto_measures_chooses_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    graphs = callback(max_sequences="auto", costs="measure", backend=Stopwatch(), require=False)
    with caplog.at_level("INFO"):
        fit(graphs)
    assert graphs.plan is not None
    assert graphs.plan.chosen.speedup == pytest.approx(2.0)  # as measured, sequences for nothing
    assert graphs.stats.hit_rate == 1.0
    assert graphs.spent_s > graphs.stats.capture_s > 0
