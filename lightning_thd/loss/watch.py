"""The losses of single slots, while a batch's are summed -> whoever asked to see those of the batch.

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
    """Losses on the device, not read, without gradient.

    Attributes:
        losses: weight times loss of each row, ``[R]``.
        weights: what each counts, the scale of the batch among it, ``[R]``.
        kept: int64 ``[R]``, the slots they stand at; None for all slots.
    """

    losses: Tensor
    weights: Tensor
    kept: Tensor | None


class Watcher(Protocol):
    """Sees the losses of the batches it wants."""

    def wants(self, batch: THDBatch) -> bool:
        """Say whether a batch is one of the watcher's."""
        ...

    def see(self, batch: THDBatch, slots: SlotLosses, scale: float) -> None:
        """Take the losses of a batch and its scale; nothing may be read from the device here."""
        ...


_WATCHERS: weakref.WeakSet[Watcher] = weakref.WeakSet()


def watch(watcher: Watcher) -> None:
    """Show a watcher the losses of ``causal_lm_loss`` from now on, as long as somebody holds it."""
    _WATCHERS.add(watcher)


def watcher_of(batch: THDBatch) -> Watcher | None:
    """Return who wants to see a batch that is trained on; nobody looks into a recorded step."""
    if not _WATCHERS or shapes_are_static() or not torch.is_grad_enabled():
        return None
    return next((watcher for watcher in _WATCHERS if watcher.wants(batch)), None)
