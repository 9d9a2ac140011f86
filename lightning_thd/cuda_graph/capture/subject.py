"""A step function and the module it trains -> one value that capture, timing and choice share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_thd.batch import THDBatch
from lightning_thd.cuda_graph.capture.backend import Backend

StepFunction = Callable[..., Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A step function, the module it trains, and the engine that captures it.

    Attributes:
        function: ``function(module, batch, *rest)`` gives the loss, alone or among other tensors.
        module: what it trains.
        backend: captures and measures.
    """

    function: StepFunction
    module: nn.Module
    backend: Backend

    def __call__(self, batch: Any, *rest: Any) -> Any:
        """Run the step eagerly."""
        return self.function(self.module, batch, *rest)


class Example(NamedTuple):
    """An example call of the step, which tells its device, its layout and its number of arguments.

    Attributes:
        batch: of the call.
        rest: further arguments.
    """

    batch: THDBatch
    rest: tuple[Any, ...] = ()

    @property
    def device(self) -> torch.device:
        """Return the device that the step runs on."""
        return self.batch.input_ids.device


def differentiable(output: Any) -> list[Tensor]:
    """List the tensors in a step's output that require gradients."""
    return [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]


def differentiate(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], grad_outputs: Sequence[Tensor] | None = None
) -> tuple[Tensor | None, ...]:
    """Compute gradients, None for a leaf that no output depends on, with autocast off as ``backward()`` does.

    Inside of autocast the backward of an operator that ran in fp32 would be cast again, and its gradient
    would differ from that of an eager step.
    """
    starts = [torch.ones_like(x) for x in outputs] if grad_outputs is None else grad_outputs
    with torch.autocast(outputs[0].device.type, enabled=False):
        return torch.autograd.grad(outputs, leaves, starts, allow_unused=True)
