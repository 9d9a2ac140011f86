"""The oracle of every port: the unported module on one sequence at a time, over the rows of each step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

STEPS, LR = 10, 0.2
# (model, row) -> the sum of the losses of a row by itself, and what the mean divides by
Alone = Callable[[nn.Module, dict[str, Any]], tuple[Tensor, int]]


class Ran(NamedTuple):
    """What a port did: the rows of every step, its losses, and the parameters in the end."""

    steps: list[list[int]]
    losses: list[float]
    parameters: dict[str, Tensor]


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9)


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def train_alone(
    model: nn.Module, rows: Sequence[dict[str, Any]], steps: list[list[int]], alone: Alone
) -> tuple[list[float], dict[str, Tensor]]:
    """Train a copy of a model on the rows of every step, each by itself."""
    model, losses = copy.deepcopy(model).train(), []
    optimizer = optimizer_of(model.parameters())
    for step in steps:
        results = [alone(model, rows[i]) for i in step]
        loss = sum(total for total, _ in results) / sum(count for _, count in results)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, parameters_of(model)


def check(
    model: nn.Module, rows: Sequence[dict[str, Any]], ran: Ran, alone: Alone, *, to: float = 1e-9
) -> None:
    """Compare a run of a port, which began with these weights, with the oracle."""
    assert len(ran.steps) == STEPS
    assert max(map(len, ran.steps)) > 1
    losses, parameters = train_alone(model, rows, ran.steps, alone)
    assert ran.losses == pytest.approx(losses, rel=to, abs=to)
    for name, parameter in parameters.items():  # some, such as BERT's biases of keys, never move
        torch.testing.assert_close(ran.parameters[name], parameter, rtol=to, atol=to, msg=name)
