"""A Trainer's counters -> where a loader stands in its epoch, when an epoch ends, what must not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException


class Progress:
    """A Trainer's position in its epoch, for a loader that saves where it stands."""

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer
        self._accumulate = trainer.accumulate_grad_batches

    def hooks(self, *, resizes: bool) -> dict[str, Callable[..., Any]]:
        """Return the functions by which a ``THDLoader`` follows the Trainer, by its arguments' names."""
        told: dict[str, Any] = {
            "consumed": self.consumed,
            "limit": self.limit,
            "on_load": self.match,
            "check": self.refuse_other_accumulation,
        }
        return {**told, "on_epoch": self.resize} if resizes else told

    def stream_hooks(self) -> dict[str, Any]:
        """Return the functions by which a ``StreamLoader`` follows the Trainer, by its arguments' names."""
        return {
            "consumed": self.total,
            "on_load": self.match,
            "begins": self.begins_epoch,
            "check": self.refuse_other_accumulation,
        }

    def consumed(self) -> int:
        """Return how many batches of this epoch the Trainer has finished."""
        # `processed` counts a batch once its update is done and before on_train_batch_end, where checkpoints
        # are written; a batch that raised is not counted and comes again.
        return 0 if self.begins_epoch() else int(self._batches.current.processed)

    def begins_epoch(self) -> bool:
        """Return whether the Trainer is in ``on_train_epoch_start``, or a checkpoint was written there."""
        epochs: Any = self._trainer.fit_loop.epoch_progress.total
        return bool(epochs.started < epochs.ready)

    def refuse_other_accumulation(self) -> None:
        """Refuse accumulation that was changed while the Trainer runs: the packs of a step are planned.

        Raises:
            MisconfigurationException: saying what it was.
        """
        now = self._trainer.accumulate_grad_batches
        if now != self._accumulate:
            raise MisconfigurationException(
                f"accumulate_grad_batches is {now}, but was {self._accumulate} when the training data was "
                "set up, and the loss of each pack is its share of a step of that many. Set it before fit, "
                "and begin another fit to change it."
            )

    def total(self) -> int:
        """Return how many batches of all epochs and fits the Trainer has finished."""
        return int(self._batches.total.processed)

    def limit(self) -> int | None:
        """Return the most batches that the Trainer takes of an epoch."""
        batches = self._trainer.num_training_batches
        return int(batches) if batches != float("inf") else None

    def resize(self, batches: int) -> None:
        """Set the Trainer's number of batches for this epoch: a mixture's epochs differ by a few."""
        trainer = self._trainer
        limited = trainer.limit_train_batches
        if isinstance(limited, int) and not isinstance(limited, bool):
            batches = min(batches, limited)
        elif limited is not None:
            batches = int(batches * limited)
        loop = trainer.fit_loop
        if loop.max_batches == batches or getattr(trainer, "overfit_batches", 0) > 0:
            return
        loop.max_batches = batches
        combined = loop._combined_loader
        if combined is not None:
            combined.limits = batches  # set once by Lightning, before the first epoch
        if isinstance(trainer.val_check_interval, float):
            trainer.val_check_batch = max(1, int(batches * trainer.val_check_interval))

    def match(self, start: int) -> None:
        """Set Lightning's batch counter to the loader's position, after a change of ranks or mid-step."""
        progress = self._batches
        if self.begins_epoch() and not start:  # still the counts of the epoch before
            progress.current.reset()
            progress.is_last_batch = False
            return
        shift = start - progress.current.processed
        if shift:
            for counter in (progress.current, progress.total):
                for name in ("ready", "started", "processed", "completed"):
                    setattr(counter, name, max(0, getattr(counter, name) + shift))
            progress.current.ready = progress.current.started = start

    @property
    def _batches(self) -> Any:
        return self._trainer.fit_loop.epoch_loop.batch_progress
