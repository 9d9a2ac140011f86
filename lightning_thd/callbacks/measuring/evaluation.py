"""Lightning's validation, test and prediction hooks -> three methods that know the stage by name."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class EvaluationHooks(Callback):
    """Hands the hooks of all evaluation loops to three methods; the sanity check is no evaluation."""

    def evaluation_start(self, name: str, trainer: Trainer, pl_module: LightningModule) -> None:
        """A loop begins; ``name`` is "validate", "test" or "predict"."""
        raise NotImplementedError

    def evaluation_batch(self, name: str, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        """A batch has run."""
        raise NotImplementedError

    def evaluation_end(self, name: str, trainer: Trainer, pl_module: LightningModule) -> None:
        """A loop ends."""
        raise NotImplementedError

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hand on."""
        if not trainer.sanity_checking:
            self.evaluation_start("validate", trainer, pl_module)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: int
    ) -> None:
        """Hand on."""
        if not trainer.sanity_checking:
            self.evaluation_batch("validate", trainer, pl_module, batch)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hand on."""
        if not trainer.sanity_checking:
            self.evaluation_end("validate", trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hand on."""
        self.evaluation_start("test", trainer, pl_module)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: int
    ) -> None:
        """Hand on."""
        self.evaluation_batch("test", trainer, pl_module, batch)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hand on."""
        self.evaluation_end("test", trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hand on."""
        self.evaluation_start("predict", trainer, pl_module)

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: int
    ) -> None:
        """Hand on."""
        self.evaluation_batch("predict", trainer, pl_module, batch)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hand on."""
        self.evaluation_end("predict", trainer, pl_module)
