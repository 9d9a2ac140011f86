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
    gradients = grads(module)
    module.zero_grad()
    return gradients


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
        for actual, sum_ in zip(grads(model), expected, strict=True):
            torch.testing.assert_close(actual, sum_, rtol=1e-12, atol=1e-14)
    assert step.stats.replays == 2 * sum(batch is not TOO_LONG for batch in batches)


def test_gradients_are_the_graphs_own_and_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert copied == [1]  # the loss; no gradient, and no sum of earlier microbatches
    written = [
        call.function._schema.name
        for captured in step._graphs.values()
        for call in captured._pair.backward.calls
        if call.function._schema.name in ("aten::copy_", "aten::_foreach_copy_")
    ]
    assert written == []  # nor is a gradient copied inside of a graph


def test_graphs_of_a_large_model_share_the_gradients_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_SMALL", 0)
    model, step = model_and_step()
    batches = [FITS[0], random_batch(5, count=8, longest=6), FITS[1]]
    expected = wanted(model, batches)
    for batch in batches:
        step(batch).backward()
    for actual, sum_ in zip(grads(model), expected, strict=True):
        torch.testing.assert_close(actual, sum_, rtol=1e-12, atol=1e-14)
    first, second = (captured._pair.gradients for captured in step._graphs.values())
    assert len(step._graphs) == 2
    assert all(a is b for a, b in zip(first, second, strict=True))


def test_a_gradient_in_the_memory_of_something_else_is_copied() -> None:
    class Scale(torch.autograd.Function):
        """Returns a buffer of the module as gradient, which clipping may not change."""

        @staticmethod
        def forward(ctx: Any, weight: Tensor, buffer: Tensor) -> Tensor:
            ctx.save_for_backward(buffer)
            return (weight * buffer).sum()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return ctx.saved_tensors[0], None

    model = tiny_llama(torch.float64)
    model.register_buffer("factors", torch.ones_like(model.model.norm.weight))
    model.extra = nn.Parameter(torch.ones_like(model.factors))

    def loss(module: Any, batch: THDBatch) -> Tensor:
        return causal_lm_loss(module, batch) + Scale.apply(module.extra, module.factors)

    step = graphed(model, loss, keep_gradients=False)
    step(FITS[0]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert bool((model.factors == 1.0).all())
    assert float(model.extra.grad.max()) < 1.0
    model.zero_grad()
    step(FITS[1]).backward()
    assert bool((model.extra.grad == 1.0).all())


@pytest.mark.parametrize("late", ["hook", "keep"])
def test_a_sum_that_began_without_copies_goes_on_with_them(late: str) -> None:
    model, step = model_and_step()
    expected = wanted(model, FITS)
    step(FITS[0]).backward()
    if late == "hook":
        next(model.parameters()).register_hook(lambda gradient: None)
    else:
        step.keep_gradients = True
    for batch in FITS[1:]:
        step(batch).backward()
    for actual, sum_ in zip(grads(model), expected, strict=True):
        torch.testing.assert_close(actual, sum_, rtol=1e-12, atol=1e-14)


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
    for actual, gradient in zip(grads(model), expected, strict=True):
        torch.testing.assert_close(actual, gradient, rtol=1e-12, atol=1e-14)


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
        for actual, of_loss in zip(grads(model), expected, strict=True):
            torch.testing.assert_close(actual, of_loss, rtol=1e-12, atol=1e-14)
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
    torch.testing.assert_close(kept, before, rtol=0, atol=0)


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
    for actual, gradient in zip(grads(model), expected, strict=True):
        torch.testing.assert_close(actual / 8.0, gradient, rtol=1e-12, atol=1e-14)
