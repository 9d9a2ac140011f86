"""All metrics -> the metrics that loggers get, and the charts that loggers show first."""

from __future__ import annotations

import re
from collections.abc import Iterable

from lightning.fabric.loggers import TensorBoardLogger
from lightning.pytorch.loggers import Logger, WandbLogger

# Loggers get only these keys by default.
_LOGGED = re.compile(
    r".*?(device/(mfu|hfu|tflops_per_gpu|flops_per_sec|(real_)?items_per_sec)|packing/\w+|experts/\w+|total_flops"
    r"|step_time/\w+|cuda_graph/\w+)"
)
# TensorBoard shows these charts under CUSTOM SCALARS, in this order. The keys are regular expressions.
LAYOUT = {
    "Training": {
        "MFU": ["Multiline", ["train/device/mfu"]],
        "real tokens/s of a device": ["Multiline", ["train/device/real_items_per_sec"]],
        "loss": ["Multiline", ["train/loss.*", "val/loss.*"]],
        "fill": ["Multiline", ["train/packing/fill"]],
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
