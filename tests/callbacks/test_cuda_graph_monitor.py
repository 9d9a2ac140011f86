"""Throughput beside graphs: capture is no training time, and FLOPs are counted where operators run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_thd import THDBatch, THDThroughputMonitor, causal_lm_loss
from lightning_thd.cuda_graph.recording import RecordingBackend
from tests.callbacks.fits import Clock
from tests.callbacks.support import callback, fit
from tests.cuda_graph.support import GraphModule, graphed, random_batch
from tests.tiny import tiny_llama


class Timed(GraphModule):
    """Every training step takes a second, replayed or not."""

    def __init__(self, clock: Clock, *, captures: bool = True) -> None:
        super().__init__()
        self.clock, self.captures = [clock], captures

    def training_step(self, batch: THDBatch, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return output if self.captures else {**output, "loss": output["loss"] * output["loss"].item()}

    def on_after_backward(self) -> None:
        self.clock[0].sleep(1.0)
        super().on_after_backward()


class Slow(RecordingBackend):
    """Every capture, or attempt at one, takes a thousand seconds."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def capture(self, function: Any) -> Any:
        self.clock.sleep(1000.0)
        return super().capture(function)


@pytest.mark.parametrize("captures", [True, False])
def test_the_step_that_captures_is_left_out_of_the_rates(captures: bool) -> None:
    rates = []
    for graphs in (True, False):
        clock = Clock()
        monitor = THDThroughputMonitor(peak=1e9, warmup_steps=0, clock=clock, every_n_steps=6)
        graph = callback(backend=Slow(clock), require=False)
        module = Timed(clock, captures=captures)
        both = (monitor, graph) if graphs else (monitor,)
        if graphs and not captures:
            with pytest.warns(UserWarning, match=r"\.item\(\) reads a value"):
                fit(*both, module=module)
        else:
            fit(*both, module=module)
        rates.append(monitor.latest["train/device/batches_per_sec"])
        assert clock.now >= 1000.0 * graphs
        assert (graph.stats.replays >= 4) == (graphs and captures)
        assert "parameters_moved" not in graph.stats.fallbacks  # by the hooks that count calls
        assert (graph.stats.capture_s > 0) == graphs
    assert rates == pytest.approx([1.0, 1.0])


def test_a_mode_that_watches_operators_sees_them() -> None:
    model, batch = tiny_llama(torch.float64), random_batch(1, count=4)
    step = graphed(model)
    step(batch).backward()
    with FlopCounterMode(display=False) as eager:
        causal_lm_loss(model, batch).backward()
    with FlopCounterMode(display=False) as found:
        step(batch).backward()
    assert found.get_total_flops() == eager.get_total_flops() > 0
    assert step.stats.fallbacks == {"watched": 1}
    step(batch).backward()
    assert step.stats.replays == 2
