"""What a graph has baked in: modules, their hooks and tensors, and the numbers that they hold."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_thd import causal_lm_loss
from lightning_thd._static import only_looking
from lightning_thd.cuda_graph.fingerprint import Fingerprint, watched
from tests.cuda_graph.support import GraphModule, gradients, graphed, random_batch, worst
from tests.tiny import tiny_llama


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._alpha = 1.0
        self.window = (4, 0)
        self.config = SimpleNamespace(beta=2.0)
        self.shape = torch.abs
        self.gain = torch.ones(1)

    def helper(self) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.shape(x) * self.helper()
        self.calls = getattr(self, "calls", 0) + 1
        result: Tensor = self.last * self._alpha * self.config.beta * self.gain
        return result


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.plain = nn.Linear(2, 2, bias=False)
        self.norm = nn.BatchNorm1d(2)
        self.inner = Inner()
        self.metric = MeanMetric()  # whose hash is of its state
        self.scale = 1.0
        self.seen = [1]
        self.config = {2: 0.5}
        self.register_buffer("table", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(self.norm(self.plain(self.linear(x)))) * self.scale
        return result


def taken_of(part: Part) -> Fingerprint:
    with watched(part) as uses:
        part(torch.ones(4, 3)).sum().backward()
    return Fingerprint(part, uses)


def replace_data(part: Part) -> None:
    part.linear.weight.data = part.linear.weight.data.clone()


def replace_buffer(part: Part) -> None:
    part.table = torch.zeros(2)


def swap_for_a_setting(part: Part) -> None:
    """Keep the number of attributes: one that is not compared goes, a setting comes."""
    del part.inner.last
    part.inner.delta = 2.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace_data, "weight moved to other memory"),
        (replace_buffer, "table moved to other memory"),
        (lambda part: part.linear.bias.requires_grad_(False), "bias.requires_grad changed"),
        (lambda part: setattr(part, "scale", 2.0), "the attribute scale changed"),
        (lambda part: setattr(part, "scale", True), "the attribute scale changed"),  # of another dtype
        (lambda part: setattr(part.inner, "_alpha", 2.0), "the attribute inner._alpha"),
        (lambda part: setattr(part.inner, "window", (8, 0)), "the attribute inner.window"),
        (swap_for_a_setting, "the attribute inner.delta"),
        (lambda part: setattr(part, "seen", [1]), "the attribute seen"),  # another list
        (lambda part: setattr(part.inner.config, "beta", 1.0), "the attribute inner.config.beta"),
        (lambda part: setattr(part, "linear", nn.Linear(3, 2)), "weight moved|_modules changed"),
        (lambda part: part.inner.add_module("new", nn.Identity()), "inner._modules changed"),
        (lambda part: part.inner.register_buffer("new", torch.zeros(1)), "inner._buffers changed"),
        (lambda part: part.linear.register_forward_hook(print), "linear._forward_hooks changed"),
        (lambda part: part.linear.register_full_backward_hook(print), "linear._backward_hooks changed"),
        (lambda part: setattr(part.norm, "forward", lambda x: x), "the attribute norm.forward"),
        (lambda part: setattr(part.inner, "helper", lambda: 2.0), "the attribute inner.helper"),
        (lambda part: setattr(part.inner, "__class__", type("Other", (Inner,), {})), "Inner became a Other"),
    ],
)
def test_changes_are_named(change: Callable[[Part], object], message: str) -> None:
    part = Part()
    fingerprint = taken_of(part)
    with torch.no_grad():
        part.linear.weight.mul_(2.0)  # in place: a graph sees it
    part.seen.append(2)  # contents of lists are not compared
    part.inner.fresh = torch.ones(1)
    part.inner(torch.zeros(1))  # which stores what it was given, and counts
    part.scale = float("1")  # an equal number
    part.metric.update(1.0)
    part.metric.more = nn.Linear(1, 1)  # the step does not use it
    watch = part.linear.register_forward_pre_hook(only_looking(partial(print)))

    assert fingerprint.change() is None
    watch.remove()
    assert fingerprint.change() is None

    change(part)
    reason = fingerprint.change()
    assert reason is not None
    assert re.search(message, reason)


def test_hooks_of_every_module_are_watched() -> None:
    fingerprint = taken_of(Part())
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    assert fingerprint.change() == "the hooks of every module changed"
    handle.remove()
    assert fingerprint.change() is None


class Weighed(GraphModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"factor": 1.0})
        self.beta = np.float32(1.0)
        self.batches = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return causal_lm_loss(self.model, batch) * self.hparams["factor"] * weight_of(self)


def weight_of(module: Any) -> float:
    weight: float = module.beta
    return weight


def test_numbers_that_a_lightning_module_reads_are_seen_and_counters_are_not() -> None:
    module = Weighed()
    step = graphed(module, lambda module, batch: module.training_step(batch, 0))
    batch = random_batch(2)
    before = float(step(batch).detach())
    module.batches += 1
    assert float(step(batch).detach()) == pytest.approx(before)
    assert step.stats.fallbacks == {}
    assert type(module) is Weighed
    module.hparams["factor"] = 0.5
    assert float(step(batch).detach()) == pytest.approx(before / 2)
    step(batch)
    module.beta = np.float32(0.5)
    assert float(step(batch).detach()) == pytest.approx(before / 4)
    assert step.stats.fallbacks == {"parameters_moved": 2}


def test_a_model_changed_between_steps_runs_as_it_is_now() -> None:
    model = tiny_llama(torch.float64)
    step = graphed(model)
    batch = random_batch(1)
    step(batch).backward()
    model.model.layers[0].self_attn.scaling *= 3.0
    eager = causal_lm_loss(model, batch)
    expected = [x.clone() for x in gradients(model, eager)]
    eager = eager.detach()
    for _ in range(2):  # eagerly at first, then from graphs of what it has become
        loss = step(batch)
        assert abs(float(loss.detach() - eager)) < 1e-9
        assert worst(gradients(model, loss), expected) < 1e-7
    assert step.stats.replays == 2
    assert step.stats.fallbacks == {"parameters_moved": 1}
