"""Lightning's validation, test and prediction hooks -> three methods that know the stage by name."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class EvaluationHooks(Callback):
    """Forwards the hooks of all evaluation loops; the sanity check is none of them."""

    def _evaluation_start(self, trainer: Trainer, pl_module: LightningModule, name: str) -> None:
        raise NotImplementedError

    def _evaluation_batch(
        self,
        name: str,
        batch: Any,
    ) -> None:
        raise NotImplementedError

    def _evaluation_end(self, trainer: Trainer, pl_module: LightningModule, name: str) -> None:
        raise NotImplementedError

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the training clock and start one of validation's own."""
        if not trainer.sanity_checking:
            self._evaluation_start(trainer, pl_module, "validate")

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        *_: int,
    ) -> None:
        """Count the batch."""
        if not trainer.sanity_checking:
            self._evaluation_batch("validate", batch)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log validation's rates and let the training clock go on."""
        if not trainer.sanity_checking:
            self._evaluation_end(trainer, pl_module, "validate")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._evaluation_start(trainer, pl_module, "test")

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        *_: int,
    ) -> None:
        """Count the batch."""
        self._evaluation_batch("test", batch)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log testing's rates."""
        self._evaluation_end(trainer, pl_module, "test")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._evaluation_start(trainer, pl_module, "predict")

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        *_: int,
    ) -> None:
        """Count the batch."""
        self._evaluation_batch("predict", batch)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log prediction's rates."""
        self._evaluation_end(trainer, pl_module, "predict")
