"""Gradients that a replay hands over without copies: sums, hooks, and what may not see them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.cuda_graph import capture
from tests.cuda_graph.support import graphed, in_graph, random_batch
from tests.tiny import tiny_llama

FITS = [random_batch(seed, count=4) for seed in range(3)]
TOO_LONG = THDBatch.collate([{"input_ids": [5] * 100}])  # longer than a bucket allows, so it runs eagerly


def model_and_step(**options: Any) -> tuple[nn.Module, Any]:
    model = tiny_llama(torch.float64)
    return model, graphed(model, keep_gradients=False, **options)


def grads(module: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def wanted(module: nn.Module, batches: list[THDBatch]) -> list[Tensor]:
    """Sum the gradients of batches by autograd, each on the padded shapes of its graph."""
    module.zero_grad()
    for batch in batches:
        loss = causal_lm_loss(module, batch) if batch is TOO_LONG else in_graph(module, batch)
        loss.backward()
    found = grads(module)
    module.zero_grad()
    return found


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize(
    "batches",
    [FITS[:1], FITS[:2], FITS, [FITS[0], TOO_LONG, FITS[1]], [TOO_LONG, FITS[0], FITS[1]]],
    ids=["one", "two", "three", "eager between", "eager first"],
)
def test_sums_over_microbatches_are_those_of_autograd(batches: list[THDBatch], to_none: bool) -> None:
    model, step = model_and_step()
    expected = wanted(model, batches)
    for _ in range(2):
        model.zero_grad(set_to_none=to_none)
        for batch in batches:
            step(batch).backward()
        for found, sum_ in zip(grads(model), expected, strict=True):
            torch.testing.assert_close(found, sum_, rtol=1e-12, atol=1e-14)
    assert step.stats.replays == 2 * sum(batch is not TOO_LONG for batch in batches)


def test_gradients_are_the_buffers_and_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model, step = model_and_step()
    step(FITS[0]).backward()
    places = [p.grad.data_ptr() for p in model.parameters()]
    copied: list[int] = []
    copies = capture.copies

    def counted(tensors: Any) -> list[Tensor]:
        copied.append(len(tensors))
        return copies(tensors)

    monkeypatch.setattr(capture, "copies", counted)
    model.zero_grad()
    step(FITS[1]).backward()
    assert [p.grad.data_ptr() for p in model.parameters()] == places
    assert copied == [1, 0]  # the loss; no gradient, and no sum of earlier microbatches


@pytest.mark.parametrize("kind", ["before", "after"])
def test_a_hook_of_a_parameter_gets_its_gradient_as_ever(kind: str) -> None:
    model, step = model_and_step()
    expected = wanted(model, FITS[:1])
    step(FITS[1]).backward()
    model.zero_grad()
    seen: list[float] = []
    weight = next(model.parameters())
    if kind == "before":
        handle = weight.register_hook(lambda gradient: seen.append(float(gradient.norm())))
    else:
        handle = weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.norm())))
    step(FITS[0]).backward()
    assert seen == pytest.approx([float(expected[0].norm())])
    handle.remove()
    for found, gradient in zip(grads(model), expected, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("keep", [True, False])
def test_an_output_that_no_backward_uses_has_no_gradient_of_the_replay_before(keep: bool) -> None:
    def two_losses(module: Any, batch: THDBatch) -> dict[str, Tensor]:
        loss = causal_lm_loss(module, batch)
        return {"loss": loss, "size": module.lm_head.weight.square().sum()}

    model = tiny_llama(torch.float64)
    step = graphed(model, two_losses, keep_gradients=keep)
    expected = wanted(model, FITS[:1])
    for _ in range(2):
        both = step(FITS[0])
        (both["loss"] + both["size"]).backward()
        model.zero_grad()
        step(FITS[0])["loss"].backward()
        for found, of_loss in zip(grads(model), expected, strict=True):
            torch.testing.assert_close(found, of_loss, rtol=1e-12, atol=1e-14)
        model.zero_grad()
    assert step.stats.replays == 4


def test_kept_gradients_stay() -> None:
    model, step = model_and_step()
    step.keep_gradients = True
    step(FITS[0]).backward()
    kept = [p.grad for p in model.parameters()]
    before = [x.clone() for x in kept]
    model.zero_grad()
    step(FITS[1]).backward()
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))


def test_a_second_backward_is_refused() -> None:
    step = model_and_step()[1]
    loss = step(FITS[0])
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ran a second time through a replayed step"):
        loss.backward()


def test_scaled_losses_scale_the_gradients_that_are_handed_over() -> None:
    model, step = model_and_step()
    expected = wanted(model, FITS[:1])
    (step(FITS[0]) * 8.0).backward()
    for found, gradient in zip(grads(model), expected, strict=True):
        torch.testing.assert_close(found / 8.0, gradient, rtol=1e-12, atol=1e-14)
