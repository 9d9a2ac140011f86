"""More of what people do with a Trainer: metric objects, weights thawed later, checkpoints by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import BaseFinetuning, LearningRateFinder, ModelCheckpoint, Timer
from torch import Tensor
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_thd import Packs, THDBatch, THDDataModule, causal_lm_loss
from tests.strategies.attacks import ATTACKS, Found, attack, epochs, trained
from tests.strategies.jobs import CAPACITY, full_parameters, make_optimizer
from tests.strategies.matrix import STEP, Cell, Plain, given, logged
from tests.tiny import sequences


class Measured(Plain):
    """Logs metric objects in training and validation, by step and by epoch."""

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
        self.log("train/mean", self.mean, on_step=True, on_epoch=True)
        self.log("train/largest", self.largest, on_step=True, on_epoch=True)
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


class Trainable(Plain):
    """Trains what is not frozen when the optimizer is made."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained_now = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained_now, lr=1e-2, eps=1e-5)


class Thaw(BaseFinetuning):
    """Freezes a layer, and trains it too from the second epoch on."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        model: Any = pl_module.model
        self.freeze([model.model.layers[0], model.model.embed_tokens])

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: Any) -> None:
        model: Any = pl_module.model
        if epoch >= 1:
            self.make_trainable(model.model.layers[0])
        if epoch == 1:
            # Lightning's unfreeze_and_add_param_group compares weights by value, across meshes too.
            optimizer.add_param_group({"params": list(model.model.layers[0].parameters()), "lr": 1e-2})


class FreezesLater(Plain):
    """Stops training the embedding after the first epoch."""

    def on_train_epoch_start(self) -> None:
        self.model.model.embed_tokens.requires_grad_(self.current_epoch == 0)


class Planned(Plain):
    """Plans its rates over the steps that the Trainer says it will run."""

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.model)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


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


def frozen_and_resumed(cell: Cell) -> Found:
    """Thaw a layer, and go on from a checkpoint of that time."""
    options: dict[str, Any] = epochs(limit_train_batches=2, max_epochs=2)
    keep = saver(cell, save_on_train_epoch_end=True, save_top_k=-1)
    cell.fit(Trainable(), callbacks=[Thaw(), keep], enable_checkpointing=True, **options)
    module = Trainable()
    options["max_epochs"] = 3
    cell.fit(module, callbacks=[Thaw()], ckpt_path=f"{cell.folder}/step=4.ckpt", **options)
    return full_parameters(module.model)


def epochs_of(cell: Cell, module: Plain, **options: Any) -> Found:
    trainer = cell.fit(module, **epochs(limit_train_batches=2, max_epochs=3, **options))
    return full_parameters(module.model) | {"steps": torch.tensor(float(trainer.global_step))}


def packs_validated_in_between(cell: Cell) -> Found:
    module = Plain()
    options = epochs(max_epochs=2, check_val_every_n_epoch=None, val_check_interval=3, limit_train_batches=4)
    trainer = cell.fit(module, Packs(2 * cell.dp), accumulate_grad_batches=2, **options)
    return full_parameters(module.model) | logged(trainer)


def of_epochs(cell: Cell) -> Found:
    """Return what metrics tell of whole epochs: a step's value is of the rank's own packs."""
    found = trained(Measured, val_check_interval=2, max_steps=4)(cell)
    return {name: value for name, value in found.items() if "_step" not in name and name[7:] != "train/mean"}


MORE: dict[str, Callable[[Cell], Found]] = {
    "metrics": trained(Measured, val_check_interval=2, max_steps=4),
    "metrics of epochs": of_epochs,
    "counts": trained(Counting, val_check_interval=2, max_steps=4),
    "thawed": trained(Trainable, **epochs(callbacks=lambda: [Thaw()], limit_train_batches=2)),
    "thawed and resumed": frozen_and_resumed,
    "frozen later": trained(FreezesLater, **epochs(limit_train_batches=2)),
    "by name": by_name,
    "two sets": two_sets,
    "finder": finder,
    "reloaded": lambda cell: epochs_of(cell, Plain(), reload_dataloaders_every_n_epochs=1),
    "not reloaded": lambda cell: epochs_of(cell, Plain()),
    "validated in between": packs_validated_in_between,
    "planned": trained(Planned, **epochs(max_epochs=1)),
    "fused": trained(Fused),
    "timer": trained(Plain, callbacks=lambda: [Timer({"hours": 1})]),
    "traced": trained(Plain, profiler="simple", detect_anomaly=True, deterministic=True),
    "no inference mode": trained(Plain, inference_mode=False, val_check_interval=1),
}
ATTACKS.update(MORE)


def attack_any(name: str, strategy: str, layout: str, folder: str) -> Found:
    """Run one attack of either module on this rank."""
    return attack(name, strategy, layout, folder)
