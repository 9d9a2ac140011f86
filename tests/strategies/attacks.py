"""What people do with a Trainer beside the matrix: logs in all hooks, limits, schedules, many Trainers."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelSummary
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_thd import Packs, Sequences, THDBatch, causal_lm_loss
from tests.strategies.jobs import full_parameters, make_optimizer
from tests.strategies.matrix import STEP, Cell, Manual, Plain, given, logged

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


class Scheduled(Plain):
    """Steps a scheduler every optimizer step or every epoch."""

    interval = "step"

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.interval}}


class ScheduledByEpoch(Scheduled):
    interval = "epoch"


class Watching(Scheduled):
    """Lowers its rate when the validation loss does not fall."""

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.model)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=9.0
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val/loss"}}


class TwoOptimizers(Manual):
    """Trains embedding and head by one optimizer and the layers by another, clipped by value."""

    def configure_optimizers(self) -> Any:
        layers = list(self.model.model.layers.parameters())
        inside = {id(parameter) for parameter in layers}
        others = [parameter for parameter in self.model.parameters() if id(parameter) not in inside]
        return [torch.optim.AdamW(part, lr=1e-2, eps=1e-5) for part in (layers, others)]

    def training_step(self, batch: THDBatch, batch_idx: int) -> dict[str, Tensor]:
        first, second = self.optimizers()  # type: ignore[misc]
        for optimizer in (first, second):
            optimizer.zero_grad()
        loss = causal_lm_loss(self.model, batch)
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.01, gradient_clip_algorithm="value")
        self.clip_gradients(second, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        first.step()
        second.step()
        return {"loss": loss.detach()}


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


def packs_of(cell: Cell) -> Packs:
    return Packs(cell.dp)


def manual_twice(cell: Cell) -> Found:
    module = TwoOptimizers()
    cell.fit(module, packs_of(cell), gradient_clip_val=None)
    return full_parameters(module.model)


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


def rates(cell: Cell) -> Found:
    logger = CSVLogger(cell.folder)
    module = Scheduled()
    cell.fit(module, callbacks=[LearningRateMonitor("step"), ModelSummary()], logger=logger)
    logger.save()
    if dist.is_initialized() and dist.get_rank() != 0:
        return full_parameters(module.model)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        found = [float(row["lr-AdamW"]) for row in csv.DictReader(file) if row["lr-AdamW"]]
    return full_parameters(module.model) | {"logged rates": torch.tensor(found, dtype=torch.float64)}


def diverged(cell: Cell) -> Found:
    module = Plain()
    stop = EarlyStopping("val/loss", divergence_threshold=0.1, check_on_train_epoch_end=False)
    trainer = cell.fit(module, callbacks=[stop], val_check_interval=1, max_steps=8)
    return full_parameters(module.model) | {"steps": torch.tensor(float(trainer.global_step))}


def predictions(cell: Cell) -> Found:
    """Predict without and with what comes back."""
    trainer = cell.trainer()
    assert trainer.predict(Plain(), given(multiple=cell.multiple), return_predictions=False) is None
    rows = [row for batch in trainer.predict(Plain(), given()) or () for row in batch]
    return {"rows": torch.tensor(float(len(rows) > 0))}


def named(cell: Cell) -> Found:
    """Fit under a strategy's name."""
    module = Plain()
    trainer = L.Trainer(
        strategy=cell.strategy,
        devices="auto" if cell.dp == 1 else cell.dp,
        accelerator="cpu",
        max_steps=3,
        logger=False,
        gradient_clip_val=0.5,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, given(multiple=cell.multiple))
    return full_parameters(module.model)


ATTACKS: dict[str, Callable[[Cell], Found]] = {
    "logs": trained(LogsEverywhere, val_check_interval=2, max_steps=4),
    "sums": trained(Sums, val_check_interval=2, max_steps=4),
    "by step": trained(Scheduled),
    "by epoch": trained(ScheduledByEpoch, **epochs(limit_train_batches=2)),
    "plateau": trained(Watching, **epochs(limit_train_batches=2)),
    "manual twice": manual_twice,
    "fraction": trained(Plain, **epochs(limit_train_batches=0.5, max_epochs=1)),
    "val fraction": trained(Plain, **epochs(val_check_interval=0.5, max_epochs=1)),
    "val batches": trained(Plain, limit_val_batches=1, val_check_interval=1),
    "overfit": trained(Plain, overfit_batches=1),
    "overfit fraction": trained(Plain, overfit_batches=0.5),
    "fast": trained(Plain, fast_dev_run=2),
    "sanity": trained(Plain, num_sanity_val_steps=-1),
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
    "max time": trained(Plain, max_time={"hours": 1}),
    "fit twice": fit_twice,
    "validate first": validate_first,
    "rates": rates,
    "diverged": diverged,
    "predictions": predictions,
    "named": named,
}


def attack(name: str, strategy: str, layout: str, folder: str) -> Found:
    """Run one attack on this rank."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    place = Path(folder) / strategy / layout / name.replace(" ", "_")
    place.mkdir(parents=True, exist_ok=True)
    return ATTACKS[name](Cell(strategy=strategy, layout=layout, folder=str(place), multiple=4))
