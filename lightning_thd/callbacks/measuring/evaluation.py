"""Lightning's validation, test and prediction hooks -> three methods that know the stage by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


def _hooks(name: str) -> Any:
    def start(self: EvaluationHooks, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.evaluation_start(name, trainer, pl_module)

    def batch_end(
        self: EvaluationHooks, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: int
    ) -> None:
        if not trainer.sanity_checking:
            self.evaluation_batch(name, trainer, pl_module, batch)

    def end(self: EvaluationHooks, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.evaluation_end(name, trainer, pl_module)

    return start, batch_end, end


class EvaluationHooks(Callback, ABC):
    """Maps the hooks of Lightning's evaluation loops to three methods; skips the sanity check."""

    @abstractmethod
    def evaluation_start(self, name: str, trainer: Trainer, pl_module: LightningModule) -> None:
        """Handle the start of an evaluation loop: "validate", "test" or "predict"."""

    @abstractmethod
    def evaluation_batch(self, name: str, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        """Handle a batch that an evaluation loop has run."""

    @abstractmethod
    def evaluation_end(self, name: str, trainer: Trainer, pl_module: LightningModule) -> None:
        """Handle the end of an evaluation loop."""

    on_validation_start, on_validation_batch_end, on_validation_end = _hooks("validate")
    on_test_start, on_test_batch_end, on_test_end = _hooks("test")
    on_predict_start, on_predict_batch_end, on_predict_end = _hooks("predict")
