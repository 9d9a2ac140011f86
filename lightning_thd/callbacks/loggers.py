"""Metrics of callbacks -> the Trainer, its progress bar and its loggers, with the charts they show first."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.fabric.loggers import TensorBoardLogger
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger, WandbLogger

from lightning_thd._trainer import logged_step

# Loggers get only these keys by default.
_LOGGED = re.compile(
    r".*?(device/(mfu|hfu|tflops_per_gpu|flops_per_sec|(real_)?items_per_sec)|packing/\w+|experts/\w+|total_flops"
    r"|step_time/\w+|cuda_graph/\w+)"
)
# TensorBoard shows these charts under CUSTOM SCALARS, in this order. The keys are regular expressions.
LAYOUT = {
    "Training": {
        "MFU, share of the peak": ["Multiline", ["train/device/mfu"]],
        "real tokens/s of a device": ["Multiline", ["train/device/real_items_per_sec"]],
        "loss": ["Multiline", ["train/loss.*", "val/loss.*"]],
        "fill, share of the slots": ["Multiline", ["train/packing/fill"]],
        "seconds of a step, by part": ["Multiline", ["train/step_time/.*"]],
    }
}
# W&B gets no default charts for these keys, so that MFU, tokens/s and loss come first.
_HIDDEN = ("device/flops_per_sec", "device/items_per_sec", "total_flops", "step_time/*")


def for_loggers(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics that loggers get by default."""
    return {key: value for key, value in metrics.items() if _LOGGED.fullmatch(key)}


def lay_out(loggers: Iterable[Logger]) -> None:
    """Show MFU, tokens/s and loss first in TensorBoard and W&B."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_custom_scalars(LAYOUT)
        elif isinstance(logger, WandbLogger):
            for key in _HIDDEN:
                logger.experiment.define_metric(
                    f"train/{key}", step_metric="trainer/global_step", hidden=True
                )


def record(
    trainer: Trainer,
    metrics: Mapping[str, float],
    *,
    logged: Mapping[str, float],
    shown: Mapping[str, float] | None = None,
) -> None:
    """Give metrics to the Trainer, from any hook.

    Args:
        trainer: the running Trainer.
        metrics: what other callbacks find in ``trainer.callback_metrics``, as float64 tensors.
        logged: what the loggers get.
        shown: what the progress bar shows.
    """
    # Not through self.log, which Lightning refuses in hooks such as on_train_end. The Trainer keeps what it
    # hands out in these dicts.
    values = torch.tensor(list(metrics.values()), dtype=torch.float64)
    trainer.callback_metrics.update(zip(metrics, values, strict=True))
    if shown is not None:
        trainer.progress_bar_metrics.update(shown)

    if not logged or not trainer.loggers:
        return
    numbers: Any = trainer.logged_metrics  # which takes floats too
    numbers.update(logged)
    step = logged_step(trainer)
    for logger in trainer.loggers:
        logger.log_metrics({**logged, "epoch": trainer.current_epoch}, step=step)
        logger.save()


def logs_now(trainer: Trainer) -> bool:
    """Return whether the Trainer logs the running batch, by its ``log_every_n_steps``."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return every > 0 and ((logged_step(trainer) + 1) % every == 0 or trainer.should_stop)


def accumulates(trainer: Trainer) -> bool:
    """Return whether the running batch only adds to the gradients, and a later one ends with the step."""
    batches = trainer.fit_loop.epoch_loop.batch_progress
    if batches.current.ready % trainer.accumulate_grad_batches == 0:
        return False

    # Lightning also steps after the last batch of an epoch, except under strategies that count by themselves.
    is_last = batches.is_last_batch or batches.current.ready == trainer.num_training_batches
    return trainer.strategy.handles_gradient_accumulation or not is_last
