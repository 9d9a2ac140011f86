"""Lightning's validation, test and prediction hooks -> three methods that know the stage by name."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class EvaluationHooks(Callback):
    """Maps the hooks of Lightning's evaluation loops to three methods; skips the sanity check."""

    def evaluation_start(self, name: str, trainer: Trainer, pl_module: LightningModule) -> None:
        """Handle the start of an evaluation loop: "validate", "test" or "predict"."""
        raise NotImplementedError

    def evaluation_batch(self, name: str, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        """Handle a batch that an evaluation loop has run."""
        raise NotImplementedError

    def evaluation_end(self, name: str, trainer: Trainer, pl_module: LightningModule) -> None:
        """Handle the end of an evaluation loop."""
        raise NotImplementedError

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Call ``evaluation_start`` for "validate", except in the sanity check."""
        if not trainer.sanity_checking:
            self.evaluation_start("validate", trainer, pl_module)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: int
    ) -> None:
        """Call ``evaluation_batch`` for "validate", except in the sanity check."""
        if not trainer.sanity_checking:
            self.evaluation_batch("validate", trainer, pl_module, batch)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Call ``evaluation_end`` for "validate", except in the sanity check."""
        if not trainer.sanity_checking:
            self.evaluation_end("validate", trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Call ``evaluation_start`` for "test"."""
        self.evaluation_start("test", trainer, pl_module)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: int
    ) -> None:
        """Call ``evaluation_batch`` for "test"."""
        self.evaluation_batch("test", trainer, pl_module, batch)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Call ``evaluation_end`` for "test"."""
        self.evaluation_end("test", trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Call ``evaluation_start`` for "predict"."""
        self.evaluation_start("predict", trainer, pl_module)

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: int
    ) -> None:
        """Call ``evaluation_batch`` for "predict"."""
        self.evaluation_batch("predict", trainer, pl_module, batch)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Call ``evaluation_end`` for "predict"."""
        self.evaluation_end("predict", trainer, pl_module)
