"""A loss made of a model's values: its gradients are those of one graph, and weights in it are named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_thd.parallel.pipeline.seam import Seam, weights_in


def model() -> tuple[Tensor, dict[str, Tensor]]:
    """Return a weight and two values that depend on it."""
    torch.manual_seed(0)
    weight = torch.randn(4, dtype=torch.float64, requires_grad=True)
    return weight, {"values": weight.sin(), "aux_loss": weight.square().sum()}


def halves(values: dict[str, Tensor]) -> Tensor:
    return values["values"].mean() / 2 + values["aux_loss"]


def only_one(values: dict[str, Tensor]) -> Tensor:
    return values["values"][1:].prod()


def in_place(values: dict[str, Tensor]) -> Tensor:
    values["values"] *= 3
    return values["values"].sum()


@pytest.mark.parametrize("make", [halves, only_one, in_place])
def test_gradients_are_those_without_a_seam(make: Callable[[dict[str, Tensor]], Tensor]) -> None:
    weight, values = model()
    (make(values) / 3).backward()
    expected = weight.grad

    again, values = model()
    seam = Seam()
    loss = make(seam.cut(values))
    joined = seam.join(loss, has_head=True)
    assert joined.item() == loss.item()
    (joined / 3).backward()
    assert expected is not None
    assert again.grad is not None
    assert torch.equal(again.grad, expected)


@pytest.mark.parametrize("make", [halves, lambda values: torch.tensor(torch.nan)])
def test_a_stage_without_the_head_runs_the_backward_pass_of_any_loss(
    make: Callable[[dict[str, Tensor]], Tensor],
) -> None:
    weight, values = model()
    seam = Seam()
    loss = make(seam.cut({name: value * torch.nan for name, value in values.items()}))
    seam.join(loss, has_head=False).backward()
    assert weight.grad is not None  # the pass ran, and another stage's gradient takes the place of this one


def test_weights_in_a_loss_are_named() -> None:
    weight, values = model()
    frozen = torch.ones(2)
    other = torch.ones(2, requires_grad=True)
    weights = [("weight", weight), ("frozen", frozen), ("other", other)]
    cut = Seam().cut(values)
    assert weights_in(cut["values"].sum(), weights) == []
    assert weights_in(cut["values"].sum().detach(), weights) == []
    assert weights_in(cut["values"].sum() + frozen.sum(), weights) == []
    assert weights_in(cut["values"].sum() * other.prod() + weight.norm(), weights) == ["weight", "other"]
