"""A model's values, and the loss that a training_step makes of them -> one backward pass through both.

A training_step gets the values without their graph, so what it makes of them has a small graph of its own.
That graph may lead to the values, but not to weights: a stage has only its own weights, so a penalty on them
would be that of one stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Seam:
    """The place in the graph of a pass between the model and the training_step that called it."""

    def __init__(self) -> None:
        self._values: list[Tensor] = []  # what the model returned, with its graph
        self._leaves: list[Tensor] = []  # the same numbers without it
        self._made: Tensor | None = None  # the loss that training_step made of the leaves

    def cut(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the model's values without their graph."""
        copies = {}
        for name, value in values.items():
            leaf = value.detach().requires_grad_()
            self._values.append(value)
            self._leaves.append(leaf)
            copies[name] = leaf.clone()  # autograd refuses to change a leaf in place
        return copies

    def join(self, loss: Tensor, *, has_head: bool) -> Tensor:
        """Return training_step's loss with a backward pass through the model.

        On stages without the head, that pass does not depend on the loss, because the next stage sends the
        gradient. So training_step may return anything there.
        """
        self._made = loss if has_head else None
        values = self._values
        self._values = []
        joined: Tensor = _Join.apply(self, loss.detach(), *values)  # type: ignore[no-untyped-call]
        return joined

    def gradients(self, of_loss: Tensor) -> Sequence[Tensor]:
        """Return the gradients of the values for a gradient of the loss; zeros on stages without the head."""
        if self._made is None:
            return [torch.zeros_like(leaf) for leaf in self._leaves]
        return torch.autograd.grad(
            self._made, self._leaves, of_loss, retain_graph=True, materialize_grads=True
        )


class _Join(torch.autograd.Function):
    """Passes the gradient of a loss on to the values that the loss was made of."""

    @staticmethod
    def forward(ctx: Any, seam: Seam, loss: Tensor, *values: Tensor) -> Tensor:
        """Return the loss; autograd sees that it depends on the values."""
        ctx.seam = seam
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Run the backward pass of what training_step did."""
        return None, None, *ctx.seam.gradients(grads[0])


def weights_in(loss: Tensor, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of the weights that a loss, made of a seam's values, depends on."""
    named = [(name, weight) for name, weight in weights if weight.requires_grad]
    if not named or not loss.requires_grad:
        return []
    gradients = torch.autograd.grad(
        loss, [weight for _, weight in named], torch.ones_like(loss), retain_graph=True, allow_unused=True
    )
    return [name for (name, _), gradient in zip(named, gradients, strict=True) if gradient is not None]
