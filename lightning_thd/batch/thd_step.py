"""The microbatches of one rank -> one step, ``THDStep``, that Lightning takes for one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_thd._checks import described, instance
from lightning_thd.batch.thd_batch import Immutable, THDBatch, weighing_rows
from lightning_thd.stats import SeqStats


class THDStep(Immutable):
    """All microbatches of one rank between two optimizer updates, for the strategies of this package.

    Attributes:
        microbatches: the same number on every rank; each carries the step's ``loss_scale``.
    """

    __slots__ = ("microbatches",)

    microbatches: tuple[THDBatch, ...]

    def __init__(self, microbatches: Sequence[THDBatch]) -> None:
        if not isinstance(microbatches, Sequence) or not all(isinstance(b, THDBatch) for b in microbatches):
            raise TypeError(f"A THDStep is made of {described(microbatches)}; wanted a list of THDBatch.")
        if not microbatches:
            raise ValueError("A THDStep needs at least one microbatch, got none.")
        self._set(microbatches=tuple(microbatches))

    def to(self, device: torch.device | str, *, non_blocking: bool | None = None) -> THDStep:
        """Move every microbatch; see ``THDBatch.to``."""
        return THDStep([batch.to(device, non_blocking=non_blocking) for batch in self.microbatches])

    def pin_memory(self) -> THDStep:
        """Return a copy in page-locked memory."""
        return THDStep([batch.pin_memory() for batch in self.microbatches])

    @property
    def stats(self) -> SeqStats:
        """Return the ``SeqStats`` of all microbatches added up."""
        first, *rest = (batch.stats for batch in self.microbatches)
        return sum(rest, start=first)

    def __len__(self) -> int:
        return len(self.microbatches)

    def __iter__(self) -> Iterator[Tensor]:
        # The rank's share of the step's loss tokens, as Lightning's weight: see THDBatch.__iter__.
        scale = self.microbatches[0].loss_scale
        yield weighing_rows(len(self) / scale if scale else 0.0)

    def __repr__(self) -> str:
        return f"THDStep({len(self)} microbatches, {self.stats.real_tokens} real tokens)"


def check_batch(batch: object) -> None:
    """Raise TypeError for anything but a ``THDBatch``, with advice for a ``THDStep``."""
    if isinstance(batch, THDStep):
        raise TypeError(
            f"batch is a THDStep of {len(batch)} microbatches; wanted one THDBatch. strategy='thd', "
            "'thd_ddp' and 'thd_model_parallel' hand training_step one at a time where the step is the whole "
            "batch, not inside a dict and not through a dataloader_iter. In a loop of your own run each of "
            "step.microbatches, and take the mean of their losses."
        )
    instance(batch, "batch", THDBatch, advice="Pass THDBatch.collate(samples).")
