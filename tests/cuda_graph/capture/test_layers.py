"""Chosen layers from graphs, the step around them eager and free to read the host."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.callbacks.cuda_graph import CaptureError, GraphedStep
from lightning_thd.cuda_graph.capture.layer_call import LayerCall
from lightning_thd.cuda_graph.capture.recording import RecordingBackend
from tests.cuda_graph.support import BUCKETS, gradients, graphed, random_batch, worst
from tests.models.families import build
from tests.tiny import checkpoint_activations, tiny_llama


@pytest.mark.parametrize(
    ("name", "layers"),
    [("qwen3", ("self_attn",)), ("mistral", ("self_attn", "mlp")), ("bamba", ("mamba", "self_attn"))],
)
def test_layers_equal_eager(name: str, layers: tuple[str, ...]) -> None:
    model = build(name, "thd").train()
    step = graphed(model, scope="layers", layers=layers)
    for seed in range(15):
        batch = random_batch(seed)
        loss = step(batch)
        found = gradients(model, loss)
        eager = causal_lm_loss(model, batch)
        assert torch.allclose(loss, eager, rtol=1e-6)
        assert worst(found, gradients(model, eager)) < 3e-6  # fp32, sums in another order
    assert step.stats.replays >= 8
    # All calls of all layers in replayed steps, two layers of each kind but Bamba's one and one; a bucket's
    # capture has one more, and so has its proof.
    calls = [call for found in layer_calls(step) for call in found.values()]
    per_step = 2 if name in ("qwen3", "bamba") else 4
    assert sum(call.replays for call in calls) == per_step * (step.stats.replays + 2 * len(BUCKETS))
    step.close()
    assert all("forward" not in module.__dict__ for module in model.modules())


def layer_calls(step: GraphedStep) -> list[dict[nn.Module, LayerCall]]:
    """The calls of every captured bucket, each bucket's from the function that replays it."""
    captured = [s for steps in step._graphs._captured.values() for s in steps.values()]
    return [inspect.getclosurevars(s._call).nonlocals["calls"] for s in captured]


def reads_host(model: nn.Module, batch: THDBatch) -> Tensor:
    loss = causal_lm_loss(model, batch)
    return loss * (1.0 + len(batch)) if loss.item() > 0 else -loss


def test_the_step_around_the_layers_may_read_the_host() -> None:
    model = tiny_llama(torch.float64)
    step = GraphedStep(
        reads_host,
        model,
        buckets=BUCKETS,
        scope="layers",
        layers=("self_attn",),
        backend=RecordingBackend(),
        require=True,
    )
    for seed in range(6):
        batch = random_batch(seed, count=6)
        assert torch.allclose(step(batch), reads_host(model, batch), rtol=1e-12)
    assert step.stats.replays == 6


def test_a_step_runs_eagerly_while_the_backward_of_another_is_outstanding() -> None:
    model = tiny_llama(torch.float64)
    step = graphed(model, scope="layers", layers=("mlp",))
    a, b = random_batch(1, count=5), random_batch(2, count=5)
    found = gradients(model, step(a) + step(b))
    assert worst(found, gradients(model, causal_lm_loss(model, a) + causal_lm_loss(model, b))) < 1e-12
    assert step.stats.fallbacks == {"pending_backward": 1}
    assert step.stats.replays == 1


class Separate(RecordingBackend):
    """Counts how often memory of its own was asked for, and by whom it is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Separate] = []
        self.captures = 0

    def separate(self) -> Separate:
        self.made.append(Separate())
        return self.made[-1]

    def capture(self, function: Any) -> Any:
        self.captures += 1
        return super().capture(function)


def test_every_layer_has_memory_of_its_own_shared_by_its_buckets() -> None:
    """Between a layer's forward and its backward all others run."""
    backend = Separate()
    step = graphed(tiny_llama(torch.float64), scope="layers", layers=("mlp",), backend=backend)
    step(random_batch(1, count=5)).backward()
    assert [one.captures for one in backend.made] == [2 * len(BUCKETS)] * 2
    assert backend.captures == 0


def test_layers_under_autocast_see_the_weights_of_now() -> None:
    model = tiny_llama(torch.float32)
    step = graphed(model, scope="layers", layers=("mlp", "self_attn"))
    for seed in range(4):
        batch = random_batch(seed, count=5)
        with torch.autocast("cpu", torch.bfloat16):
            loss = step(batch)
            found = gradients(model, loss)
            eager = causal_lm_loss(model, batch)
        wanted = gradients(model, eager)
        assert torch.allclose(loss, eager, rtol=1e-2)  # bf16 has 8 bits
        assert worst(found, wanted) < 2e-2
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.2)
    assert step.stats.replays == 4


def test_a_name_that_no_layer_has_is_refused_with_the_names_there_are() -> None:
    step = graphed(tiny_llama(), scope="layers", layers=("attention",))
    with pytest.raises(CaptureError, match=r"no submodule is named \('attention',\).*self_attn"):
        step(random_batch(1, count=4))


def test_layers_under_activation_checkpointing_are_refused() -> None:
    model = build("qwen3", "thd").train()
    checkpoint_activations(model)
    step = graphed(model, scope="layers", layers=("mlp",))
    with pytest.raises(CaptureError, match="cannot capture layers under activation checkpointing"):
        step(random_batch(1, count=4))
    assert all("forward" not in module.__dict__ for module in model.modules())
