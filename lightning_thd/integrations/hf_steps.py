"""A Trainer's batch that is a whole ``Sequences(n)`` step -> its microbatches, one backward pass each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.packing import Packs, Sequences


def packs_of(inputs: dict[str, THDBatch | THDStep]) -> tuple[THDBatch, ...]:
    """Return the packs in a batch that the Trainer's loader gave."""
    batch = inputs["batch"]
    return batch.microbatches if isinstance(batch, THDStep) else (batch,)


def train_on_packs(
    trainer: Any, one: Callable[[nn.Module, dict[str, THDBatch]], Tensor], model: nn.Module, step: THDStep
) -> Tensor:
    """Run a step's microbatches by ``one``, gradients synchronised in the last; return this rank's loss."""
    before, trainer.current_gradient_accumulation_steps = (
        trainer.current_gradient_accumulation_steps,
        len(step),
    )
    try:
        return sum_over_packs(
            step, trainer.accelerator.no_sync, model, lambda batch: one(model, {"batch": batch})
        )
    finally:
        trainer.current_gradient_accumulation_steps = before


def sum_over_packs(
    step: THDStep,
    no_sync: Callable[[nn.Module], AbstractContextManager[Any]],
    model: nn.Module,
    run: Callable[[THDBatch], Tensor],
) -> Tensor:
    """Run the microbatches of a step, all but the last under ``no_sync``, and sum their losses."""
    losses = []
    for i, batch in enumerate(step.microbatches, start=1):
        with contextlib.nullcontext() if i == len(step) else no_sync(model):
            losses.append(run(batch))
    return torch.stack(losses).sum()


def check_global_batch(global_batch: Packs | Sequences | None, accumulate: int, optimizer: str) -> None:
    """Refuse accumulation with ``Sequences(n)``, whose steps are whole, and optimizers that step in backward.

    Raises:
        ValueError: saying which of the Trainer's options to use.
    """
    if isinstance(global_batch, Sequences) and accumulate != 1:
        raise ValueError(
            f"global_batch={global_batch} with gradient_accumulation_steps={accumulate}: a step of n "
            "sequences has as many microbatches as it needs. Set gradient_accumulation_steps=1."
        )
    if isinstance(global_batch, Sequences) and ("layerwise" in optimizer or "lomo" in optimizer):
        raise ValueError(
            f"global_batch={global_batch} with optim={optimizer!r}, which steps in every backward pass: "
            "once a microbatch here, not once a step. Use another optimizer, or global_batch=Packs(n)."
        )
