"""The losses of single slots, as a batch's are summed -> watchers that asked for those of the batch.

T slots in a pack, R of them with a target.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_thd._static import shapes_are_static
from lightning_thd.batch import THDBatch


class SlotLosses(NamedTuple):
    """The losses of a batch's slots and their weights, on the device, without gradient.

    Attributes:
        losses: weight times loss of each row, ``[R]``.
        weights: what each counts, the scale of the batch among it, ``[R]``.
        kept: int64 ``[R]``, the slots they stand at; None for all slots.
    """

    losses: Tensor
    weights: Tensor
    kept: Tensor | None


class Watcher(Protocol):
    """The interface of an object that is shown the slot losses of batches it asks for."""

    def wants(self, batch: THDBatch) -> bool:
        """Return whether to show this watcher the losses of a batch."""
        ...

    def see(self, batch: THDBatch, slots: SlotLosses, scale: float) -> None:
        """Receive the losses of a batch and its scale; must not read the device."""
        ...


_WATCHERS: weakref.WeakSet[Watcher] = weakref.WeakSet()


def watch(watcher: Watcher) -> None:
    """Register a watcher for the losses of ``causal_lm_loss``, by a weak reference."""
    _WATCHERS.add(watcher)


def watcher_of(batch: THDBatch) -> Watcher | None:
    """Return the watcher of a training batch, or None; a recorded step has none."""
    if not _WATCHERS or shapes_are_static() or not torch.is_grad_enabled():
        return None
    return next((watcher for watcher in _WATCHERS if watcher.wants(batch)), None)
