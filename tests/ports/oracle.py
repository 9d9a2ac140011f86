"""The oracle of every port: the unported module on one sequence at a time, over the rows of each step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

STEPS = 10
LR = 0.2
# (model, row) -> the sum of the losses of a row by itself, and what the mean divides by
Alone = Callable[[nn.Module, dict[str, Any]], tuple[Tensor, int]]


class Ran(NamedTuple):
    """What a port did: the rows, loss and gradients of every step, and the parameters in the end."""

    steps: list[list[int]]
    losses: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]

    @classmethod
    def nothing(cls) -> Ran:
        """Return an empty record, to which a run adds its steps."""
        return cls([], [], [], {})


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9)


def note_gradients(optimizer: torch.optim.Optimizer, model: nn.Module, ran: Ran) -> torch.optim.Optimizer:
    """Let an optimizer add the model's gradients to a record in every step."""
    optimizer.register_step_post_hook(lambda *_: ran.gradients.append(gradients_of(model)))
    return optimizer


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def train_alone(
    model: nn.Module, rows: Sequence[dict[str, Any]], steps: list[list[int]], alone: Alone
) -> Ran:
    """Train a copy of a model on the rows of every step, each by itself."""
    model = copy.deepcopy(model).train()
    ran = Ran.nothing()
    optimizer = note_gradients(optimizer_of(model.parameters()), model, ran)
    for step in steps:
        results = [alone(model, rows[i]) for i in step]
        loss = sum(total for total, _ in results) / sum(count for _, count in results)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ran.losses.append(float(loss.detach()))
    return ran._replace(steps=steps, parameters=parameters_of(model))


def check(
    model: nn.Module, rows: Sequence[dict[str, Any]], ran: Ran, alone: Alone, *, to: float = 1e-9
) -> None:
    """Compare a run of a port, which began with these weights, with the oracle."""
    assert len(ran.steps) == STEPS
    assert max(map(len, ran.steps)) > 1
    expected = train_alone(model, rows, ran.steps, alone)
    assert ran.losses == pytest.approx(expected.losses, rel=to, abs=to)
    check_gradients(ran, expected, to=to)
    for name, parameter in expected.parameters.items():  # some, such as BERT's biases of keys, never move
        torch.testing.assert_close(ran.parameters[name], parameter, rtol=to, atol=to, msg=name)


def check_gradients(ran: Ran, wanted: Ran, *, to: float) -> None:
    """Compare the gradients of all parameters in every step, relative to the largest of each parameter."""
    assert len(ran.gradients) == len(wanted.gradients) == STEPS
    for step, (gradients, of_rows) in enumerate(zip(ran.gradients, wanted.gradients, strict=True)):
        assert gradients.keys() == of_rows.keys(), f"step {step}"
        for name, gradient in of_rows.items():
            error = (gradients[name] - gradient).abs().max()
            assert error <= to * max(1e-3, float(gradient.abs().max())), f"step {step}, {name}: {error}"
