"""A Trainer -> the same Trainer, which saves checkpoints inside a given context.

Lightning has a hook in the middle of saving, but none before and none after.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch import Trainer


class PausedSaving:
    """Wraps ``trainer.save_checkpoint`` until ``restore``."""

    def __init__(self, trainer: Trainer, paused: Callable[[], AbstractContextManager[None]]) -> None:
        self._trainer = trainer
        self._had = trainer.__dict__.get("save_checkpoint")
        original = trainer.save_checkpoint

        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> None:
            with paused():
                original(*args, **kwargs)

        self._save = save
        trainer.__dict__["save_checkpoint"] = save

    def restore(self) -> None:
        """Restore the Trainer's own ``save_checkpoint``, unless someone has wrapped it again."""
        if self._trainer.__dict__.get("save_checkpoint") is not self._save:
            return
        del self._trainer.__dict__["save_checkpoint"]
        if self._had is not None:
            self._trainer.__dict__["save_checkpoint"] = self._had
