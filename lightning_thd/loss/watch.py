"""The losses of a batch's slots -> the watcher that the batch carries.

T slots in a pack, R rows: the slots that the loss computes, some perhaps with weight 0.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_thd._checks import instance, shaped
from lightning_thd._static import is_trial, shapes_are_static
from lightning_thd.batch import IGNORE_INDEX, THDBatch
from lightning_thd.batch.noted import unnoted


class SlotLosses(NamedTuple):
    """The losses of a batch's slots and their weights, on the device, without gradient."""

    losses: Tensor  # per row: weight x loss x the scale that ``Watcher.see`` gets, ``[R]``
    weights: Tensor  # the weight of each row, times that scale, ``[R]``
    kept: Tensor | None  # int64 ``[R]``, the slots of the rows; None for all slots


class Watcher(Protocol):
    """The interface of an object that receives the slot losses of the batches which carry it."""

    def wants(self) -> bool:
        """Return whether this watcher wants the losses of the running code."""

    def see(self, batch: THDBatch, slots: SlotLosses, scale: float | Tensor) -> None:
        """Receive the losses of a batch and its scale; must not read the device."""


def watch(batch: THDBatch, watcher: Watcher) -> None:
    """Let a batch carry a watcher, also to its copies on devices and its shards on ranks."""
    batch._set(watcher=watcher)


def watching(batch: THDBatch) -> Watcher | None:
    """Return the watcher that a batch carries, if it wants the losses of the running code."""
    watcher: Watcher | None = batch.watcher
    return None if watcher is None or not watcher.wants() else watcher


def is_training() -> bool:
    """Return whether the running code is a training step, and no trial or recording of one."""
    return torch.is_grad_enabled() and not is_trial() and not shapes_are_static()


class Recorder:
    """Keeps the slot losses of a step that a CUDA graph records; each replay writes new values into them."""

    def __init__(self) -> None:
        self.slots: SlotLosses | None = None  # those of the last loss of the step

    def wants(self) -> bool:
        """Return True: the batch that a graph records is in no other step."""
        return True

    def see(self, batch: THDBatch, slots: SlotLosses, scale: float | Tensor) -> None:
        """Keep losses and weights, times the scale of the batch, by which ``show`` lets them be divided."""
        if scale is not batch.loss_scale:
            slots = SlotLosses(slots.losses * batch.loss_scale, slots.weights * batch.loss_scale, slots.kept)
        self.slots = slots


def show(batch: THDBatch, slots: SlotLosses) -> None:
    """Pass the slot losses of a batch to the watcher that wants them, if there is one."""
    watcher = watching(batch)
    if watcher is not None:
        watcher.see(batch, slots, float(batch.loss_scale or 0.0))


def log_token_losses(batch: THDBatch, losses: Tensor, weights: Tensor | None = None) -> None:
    """Pass the losses of a training batch's tokens to the log of a mixture's sources.

    ``causal_lm_loss`` does this itself. With another loss, call it in ``training_step``; then
    ``data/<name>/loss`` is the mean loss of the tokens of each source of a ``THDDataModule``. Without a
    mixture it does nothing. ``losses`` are floats in the shape of ``batch.token_targets``, ``[T]``; those of
    targets of -100 are ignored. ``weights`` ``[T]`` are the tokens' weights in the mean, 1 by default.
    """
    instance(batch, "batch", THDBatch, advice="Pass the batch that training_step was given.")
    batch = unnoted(batch)
    targets = batch.token_targets
    shaped(losses, "losses", targets.shape, "one per target, as batch.token_targets.")
    if weights is not None:
        shaped(weights, "weights", targets.shape, "one per target, as batch.token_targets.")

    counts = targets != IGNORE_INDEX
    factors = torch.ones_like(losses) if weights is None else weights.detach().to(losses.dtype)
    factors = torch.where(counts, factors, 0.0)
    summed = torch.where(counts, losses.detach() * factors, 0.0)
    watcher = watching(batch)
    if watcher is not None:
        watcher.see(batch, SlotLosses(summed, factors, None), 1.0)
