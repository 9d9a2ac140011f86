"""The losses of a batch's slots -> the watcher that asked for them.

T slots in a pack, R rows: the slots that the loss computes, some perhaps with weight 0.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_thd._checks import instance, shaped
from lightning_thd._static import STATIC, shapes_are_static
from lightning_thd.batch import IGNORE_INDEX, THDBatch
from lightning_thd.batch.noted import unnoted


class SlotLosses(NamedTuple):
    """The losses of a batch's slots and their weights, on the device, without gradient."""

    losses: Tensor  # per row: weight x loss x the scale that ``Watcher.see`` gets, ``[R]``
    weights: Tensor  # the weight of each row, times that scale, ``[R]``
    kept: Tensor | None  # int64 ``[R]``, the slots of the rows; None for all slots


class Watcher(Protocol):
    """The interface of an object that receives the slot losses of the batches it wants."""

    def wants(self, batch: THDBatch) -> bool:
        """Return whether this watcher wants the losses of a batch."""

    def see(self, batch: THDBatch, slots: SlotLosses, scale: float) -> None:
        """Receive the losses of a batch and its scale; must not read the device."""


WATCHER: list[weakref.ref[Watcher]] = []  # the watcher of the running training, while it exists
RECORDED: ContextVar[list[SlotLosses] | None] = ContextVar("lightning_thd_recorded_losses", default=None)


def watch(watcher: Watcher) -> None:
    """Show the losses of future batches only to this watcher, which is held by a weak reference."""
    WATCHER[:] = [weakref.ref(watcher)]


def watching(batch: THDBatch) -> tuple[Watcher | None, list[SlotLosses] | None]:
    """Return the watcher of a training batch, and the list of ``recorded_losses``; each may be None."""
    recorded = RECORDED.get()
    watcher = WATCHER[0]() if WATCHER else None
    is_training = torch.is_grad_enabled() and not getattr(STATIC, "trial", False)
    if watcher is None or not is_training or shapes_are_static() or not watcher.wants(batch):
        return None, recorded
    return watcher, recorded


@contextmanager
def recorded_losses() -> Iterator[list[SlotLosses]]:
    """Collect slot losses while a CUDA graph records a step; each replay writes new values into them."""
    recorded: list[SlotLosses] = []
    is_watched = bool(WATCHER) and WATCHER[0]() is not None
    token = RECORDED.set(recorded if is_watched else None)
    try:
        yield recorded
    finally:
        RECORDED.reset(token)


def show(batch: THDBatch, slots: SlotLosses) -> None:
    """Pass the slot losses of a batch to the watcher that wants them, if there is one."""
    watcher, _ = watching(batch)
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
    watcher, recorded = watching(batch)
    if recorded is not None:  # with the scale of the batch, as in causal_lm_loss
        scale: Tensor | float = 0.0 if batch.loss_scale is None else batch.loss_scale
        recorded.append(SlotLosses(summed * scale, factors * scale, None))
    if watcher is not None:
        watcher.see(batch, SlotLosses(summed, factors, None), 1.0)
