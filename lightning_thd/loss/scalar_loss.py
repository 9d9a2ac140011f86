"""A computation of a scalar and its gradients in one forward pass -> that scalar, differentiable.

A scalar's gradient is known up to a factor before anybody asks for it, so tiles of logits become gradients
while they are there and are never made again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lightning_thd._static import shapes_are_static
from lightning_thd.loss.checks import refuse_double_backward
from lightning_thd.loss.prepare import Operands, Settings, make_head
from lightning_thd.loss.tiles.budget import stash_rows, tile_shape
from lightning_thd.loss.tiles.gradient_sums import HeadGradients
from lightning_thd.loss.tiles.logits import Head
from lightning_thd.loss.tiles.products import is_native, without_autocast

Needs = tuple[bool, bool, bool, bool]


class Job(Protocol):
    """The computation of a scalar loss together with its gradients.

    Attributes:
        name: of the function a user called, for errors.
        further: tensors it uses beside the operands; a change of one before the backward pass is noticed.
    """

    name: str
    further: tuple[Tensor, ...]

    def run(self, head: Head, targets: Tensor, *, needs: Needs) -> tuple[Tensor, Tensor, HeadGradients]:
        """Compute the scalar, a part of it to report, and the gradients of the operands that need them."""
        ...


def scalar_loss(
    operands: Operands, targets: Tensor, settings: Settings, chunk: int | Literal["auto"], job: Job
) -> tuple[Tensor, Tensor]:
    """Return a scalar with gradients computed already in the forward pass, and the part to report."""
    rest = (targets, settings, chunk, job, *job.further)
    results: tuple[Tensor, Tensor] = _ScalarLoss.apply(*operands, *rest)  # type: ignore[no-untyped-call]
    return results


class _ScalarLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        operands, (targets, *ctx.rest), further = arguments[:5], arguments[5:9], arguments[9:]
        ctx.save_for_backward(*operands, targets, *further)
        loss, part, ctx.found = _run(ctx, operands, targets)
        ctx.mark_non_differentiable(part)
        return loss, part

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *_, job = ctx.rest
        refuse_double_backward(job.name)
        saved = ctx.saved_tensors  # once: torch.utils.checkpoint gives them a single time
        operands, targets = saved[:5], saved[5]
        # Handed out once, to be scaled in place; a second backward through a retained graph makes them again.
        found, ctx.found = ctx.found, None
        if found is None:
            *_, found = _run(ctx, operands, targets)
        upstream = grads[0]
        parts = [found.hidden, found.weight, found.bias, *found.low_rank]
        if upstream.device.type != "cpu" or shapes_are_static() or float(upstream) != 1.0:
            parts = [None if part is None else part.mul_(upstream) for part in parts]
        parts = [
            None if part is None else part.to(like.dtype) for part, like in zip(parts, operands, strict=True)
        ]
        return (*parts, *[None] * (len(ctx.needs_input_grad) - 5))


def _run(ctx: Any, operands: Operands, targets: Tensor) -> tuple[Tensor, Tensor, HeadGradients]:
    settings, chunk, job = ctx.rest
    needs = ctx.needs_input_grad
    head = kept_rows_head(operands, targets, settings, chunk)
    with without_autocast(operands[0].device):
        result: tuple[Tensor, Tensor, HeadGradients] = job.run(
            head, targets, needs=(needs[0], needs[1], needs[2], needs[3] or needs[4])
        )
    return result


def kept_rows_head(
    operands: Operands, targets: Tensor, settings: Settings, chunk: int | Literal["auto"]
) -> Head:
    """Build a ``Head`` whose tiles have as many rows as the kept logits allow."""
    hidden = operands[0]
    native = is_native(settings.compute, hidden.device)
    itemsize = settings.compute.itemsize if native else settings.accumulator.itemsize
    where: dict[str, Any] = {"device": hidden.device}
    rows = stash_rows(hidden.shape[0], settings.columns, itemsize=itemsize, chunk=chunk, **where)
    wide = settings.accumulator.itemsize
    tile = tile_shape(hidden.shape[0], settings.columns, itemsize=wide, chunk=rows, **where)
    return replace(make_head(operands, targets, settings), tile=tile)
