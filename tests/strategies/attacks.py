"""What people do with a Trainer beside the matrix: logs, metric objects, limits, schedules."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    LearningRateFinder,
    ModelCheckpoint,
    Timer,
)
from torch import Tensor
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_thd import Packs, Sequences, THDBatch, THDDataModule, causal_lm_loss
from tests.strategies.jobs import CAPACITY, full_parameters, make_optimizer
from tests.strategies.matrix import STEP, Cell, Plain, given, logged
from tests.tiny import sequences

Found = dict[str, Tensor]


class LogsEverywhere(Plain):
    """Logs in every hook that may, in every way that has a meaning on one process."""

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        loss = causal_lm_loss(self.model, batch)
        for reduction in ("mean", "max", "min"):
            for synced in (False, True):
                for on_step, on_epoch in ((True, False), (False, True), (True, True)):
                    name = f"train/{reduction}{synced:d}{on_step:d}{on_epoch:d}"
                    self.log(
                        name, loss, on_step=on_step, on_epoch=on_epoch, reduce_fx=reduction, sync_dist=synced
                    )
        self.log("train/sum", loss, on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("train/function", loss.detach(), on_epoch=True, reduce_fx=torch.mean)
        self.log("train/number", 3, on_epoch=True, sync_dist=True)
        self.log("train/prog", loss.item(), prog_bar=True, logger=False)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("hook/batch_start", float(batch_idx), sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("hook/batch_end", outputs["loss"].detach(), on_epoch=True, sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("hook/before_step", 1.5, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log("hook/epoch_end", 2.5, sync_dist=True)

    def validation_step(self, batch: THDBatch, batch_idx: int) -> None:
        loss = causal_lm_loss(self.model, batch)
        self.log("val/loss", loss)
        self.log("val/synced", loss, sync_dist=True)
        self.log("val/step", loss, on_step=True, on_epoch=True, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("hook/val_end", self.trainer.callback_metrics["val/loss"], sync_dist=True)


class Sums(Plain):
    """Logs sums over batches and ranks."""

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        loss = causal_lm_loss(self.model, batch)
        self.log("train/sum", loss, on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return loss


class Watching(Plain):
    """Lowers its rate when the validation loss does not fall."""

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.model)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=9.0
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val/loss"}}


def trained(module: type[Plain], step: Packs | Sequences = STEP, **options: Any) -> Callable[[Cell], Found]:
    def run(cell: Cell) -> Found:
        running = module()
        taken = {key: value() if callable(value) else value for key, value in options.items()}
        trainer = cell.fit(running, step, **taken)
        found = full_parameters(running.model) | logged(trainer)
        return found | {"steps": torch.tensor(float(trainer.global_step))}

    return run


def epochs(**options: Any) -> dict[str, Any]:
    return {"max_steps": -1, "max_epochs": 2, **options}


def fit_twice(cell: Cell) -> Found:
    """Fit, go on with the same Trainer, and again with another, in between an evaluation."""
    module = Plain()
    trainer = cell.trainer(max_steps=2)
    trainer.fit(module, given(multiple=cell.multiple))
    trainer.fit_loop.epoch_loop.max_steps = 3
    trainer.fit(module, given(multiple=cell.multiple))
    cell.trainer().validate(module, given(multiple=cell.multiple), verbose=False)
    cell.trainer().predict(module, given(multiple=cell.multiple))
    cell.trainer(max_steps=2).fit(module, given(multiple=cell.multiple))
    return full_parameters(module.model)


def validate_first(cell: Cell) -> Found:
    module = Plain()
    trainer = cell.trainer()
    (before,) = trainer.validate(module, given(multiple=cell.multiple), verbose=False)
    trainer.fit(module, given(multiple=cell.multiple))
    (after,) = trainer.test(module, given(multiple=cell.multiple), verbose=False)
    numbers = {**{f"logged before {k}": v for k, v in before.items()}, "logged after": after["test/loss"]}
    return full_parameters(module.model) | {k: torch.tensor(v).double() for k, v in numbers.items()}


class Measured(Plain):
    """Logs metric objects in training and validation."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.largest, self.val_mean = MeanMetric(), MaxMetric(), MeanMetric()
        words = self.model.config.vocab_size
        accuracy = {"num_classes": words, "average": "micro", "ignore_index": -100}
        self.val = MetricCollection({"right": MulticlassAccuracy(**accuracy)}, prefix="val/")

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        loss = causal_lm_loss(self.model, batch)
        self.mean(loss.detach(), weight=1.0 / batch.loss_scale)
        self.largest(float(batch_idx))
        self.log("train/mean", self.mean, on_step=False, on_epoch=True)
        self.log("train/largest", self.largest, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: THDBatch, batch_idx: int) -> None:
        logits = self.model(**batch.hf_kwargs()).logits[0]
        self.val(logits, batch.targets)
        self.log_dict(self.val)
        self.val_mean.update(causal_lm_loss(self.model, batch), weight=1.0 / batch.loss_scale)
        self.log("val/mean", self.val_mean)


class Counting(Plain):
    """Counts loss tokens by a sum over batches and ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.seen = SumMetric(), SumMetric()

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        self.tokens(float(batch.loss_tokens))
        self.log("train/tokens", self.tokens, on_step=False, on_epoch=True)
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss

    def validation_step(self, batch: THDBatch, batch_idx: int) -> None:
        self.seen(float(batch.loss_tokens))
        self.log("val/tokens", self.seen)


class Thaw(BaseFinetuning):
    """Freezes a layer, and would train it later."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        model: Any = pl_module.model
        self.freeze(model.model.layers[0])

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: Any) -> None:
        """Train nothing more."""


class FreezesLater(Plain):
    """Stops training the embedding after the first epoch."""

    def on_train_epoch_start(self) -> None:
        self.model.model.embed_tokens.requires_grad_(self.current_epoch == 0)


class Fused(Plain):
    """Updates weights by one kernel for all of them."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-5, fused=True)


class TwoSets(Plain):
    """Validates on two sets, with a metric each."""

    def validation_step(self, batch: THDBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = causal_lm_loss(self.model, batch)
        self.log("val/loss", loss, sync_dist=True)
        self.log(f"val/own/{dataloader_idx}", loss, sync_dist=True, add_dataloader_idx=False)


def saver(cell: Cell, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(cell.folder, filename="{step}", **options)


def by_name(cell: Cell) -> Found:
    """Go on from "last", test the "best" and validate what was saved, each by its name."""
    checks: dict[str, Any] = {"every_n_train_steps": 1, "save_last": True, "save_top_k": 1}
    Path(cell.folder).mkdir(parents=True, exist_ok=True)
    cell.fit(Plain(), max_steps=2, callbacks=[saver(cell, **checks)], enable_checkpointing=True)
    module, best = Plain(), {"monitor": "val/loss", "save_top_k": 2, "save_last": True}
    trainer = cell.fit(
        module,
        max_steps=5,
        callbacks=[saver(cell, **best)],
        enable_checkpointing=True,
        val_check_interval=1,
        ckpt_path="last",
    )
    found = full_parameters(module.model)
    numbers = []
    for path in ("best", "last"):
        (tested,) = trainer.test(
            module, datamodule=given(multiple=cell.multiple), ckpt_path=path, verbose=False
        )
        numbers.append(tested["test/loss"])
    (again,) = cell.trainer().validate(
        Plain(), given(multiple=cell.multiple), ckpt_path=trainer.checkpoint_callback.best_model_path
    )
    numbers.append(again["val/loss"])
    return found | {"logged numbers": torch.tensor(numbers, dtype=torch.float64)}


def two_sets(cell: Cell) -> Found:
    samples = {name: sequences(8, seed=seed) for name, seed in (("a", 7), ("b", 8))}
    train = sequences(80, labels=True)
    data = THDDataModule(train, capacity=CAPACITY, global_batch=STEP, val=samples)
    module = TwoSets()
    trainer = cell.trainer(val_check_interval=2)
    trainer.fit(module, data)
    return full_parameters(module.model) | logged(trainer)


def finder(cell: Cell) -> Found:
    find = LearningRateFinder(min_lr=1e-5, max_lr=1e-2, num_training_steps=5)
    module = Plain()
    module.lr = 1e-3
    cell.fit(module, callbacks=[find], default_root_dir=cell.folder, gradient_clip_val=None)
    assert find.optimal_lr is not None
    losses = torch.tensor(find.optimal_lr.results["loss"], dtype=torch.float64)
    return full_parameters(module.model) | {"logged losses": losses}


def packs_validated_in_between(cell: Cell) -> Found:
    module = Plain()
    options = epochs(max_epochs=2, check_val_every_n_epoch=None, val_check_interval=3, limit_train_batches=4)
    trainer = cell.fit(module, Packs(2 * cell.dp), accumulate_grad_batches=2, **options)
    return full_parameters(module.model) | logged(trainer)


ATTACKS: dict[str, Callable[[Cell], Found]] = {
    "logs": trained(LogsEverywhere, val_check_interval=1, max_steps=3),
    "sums": trained(Sums, val_check_interval=2, max_steps=4),
    "plateau": trained(Watching, **epochs(limit_train_batches=2)),
    "fraction": trained(Plain, **epochs(limit_train_batches=0.5, val_check_interval=0.5, max_epochs=1)),
    "overfit": trained(Plain, overfit_batches=1),
    "fast": trained(Plain, fast_dev_run=2),
    "sanity": trained(Plain, num_sanity_val_steps=-1, inference_mode=False, val_check_interval=1),
    "barebones": trained(
        Plain,
        barebones=True,
        logger=None,
        enable_checkpointing=None,
        enable_progress_bar=None,
        enable_model_summary=None,
        log_every_n_steps=None,
        num_sanity_val_steps=None,
    ),
    "fit twice": fit_twice,
    "validate first": validate_first,
    "metrics": trained(Measured, val_check_interval=2, max_steps=4),
    "counts": trained(Counting, val_check_interval=2, max_steps=4),
    "thawed": trained(Plain, callbacks=lambda: [Thaw()]),
    "frozen later": trained(FreezesLater, **epochs(limit_train_batches=2)),
    "by name": by_name,
    "two sets": two_sets,
    "finder": finder,
    "validated in between": packs_validated_in_between,
    "fused": trained(Fused, callbacks=lambda: [Timer({"hours": 1})]),
    "traced": trained(Plain, profiler="simple", detect_anomaly=True, deterministic=True),
}


def attack(name: str, strategy: str, layout: str, folder: str) -> Found:
    """Run one attack on this rank."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    place = Path(folder) / strategy / layout / name.replace(" ", "_")
    place.mkdir(parents=True, exist_ok=True)
    return ATTACKS[name](Cell(strategy=strategy, layout=layout, folder=str(place), multiple=4))
