"""What loggers show: MFU and loss first, and a drawing and histograms of an epoch's first packs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from lightning.fabric.loggers import TensorBoardLogger
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_thd._imports import require
from lightning_thd.callbacks.seen import microbatches
from lightning_thd.report.packs import draw_load, draw_packs

PACKS = 64  # The histograms show this many packs of an epoch.
_LANES = 16  # Only this many of them are drawn.
_INCHES = 4.8  # Loggers show pictures small: 16 lanes stay legible at 340 pixels.
_LOAD = "train/experts/load"
_DRAWN, _LENGTHS, _FILL = "train/packing/packs", "train/packing/lengths", "train/packing/fill_by_pack"
_PATCHES = "train/packing/patches_by_pack"

# TensorBoard shows these charts, in this order, under CUSTOM SCALARS. Keys are regular expressions.
LAYOUT = {
    "Training": {
        "MFU": ["Multiline", ["train/device/mfu"]],
        "real tokens/s of a device": ["Multiline", ["train/device/real_items_per_sec"]],
        "loss": ["Multiline", ["train/loss.*", "val/loss.*"]],
        "fill": ["Multiline", ["train/packing/fill"]],
        "seconds of a step, by part": ["Multiline", ["train/step_time/.*"]],
    }
}
# W&B makes no chart of these by itself: MFU, tokens/s and loss are then the first.
_HIDDEN = ("device/flops_per_sec", "device/items_per_sec", "total_flops", "step_time/*")


def lay_out(loggers: Iterable[Logger]) -> None:
    """Show MFU, tokens/s and loss first in TensorBoard and W&B."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_custom_scalars(LAYOUT)
        elif isinstance(logger, WandbLogger):
            for key in _HIDDEN:
                name = f"train/{key}"
                logger.experiment.define_metric(name, step_metric="trainer/global_step", hidden=True)


class Pictures:
    """Keeps the lengths in this rank's first packs of an epoch until they are shown; needs matplotlib."""

    def __init__(self) -> None:
        require("matplotlib", feature="pictures=True")
        self._packs: list[Sequence[int]] = []
        self._patches: list[int] = []
        self._capacity = 0
        self._waiting = False

    def begin(self, capacity: int) -> None:
        """Start collecting the packs of an epoch; if the capacity is 0, the largest pack is taken for it."""
        self._packs, self._patches, self._capacity, self._waiting = [], [], capacity, True

    def add(self, batch: Any) -> bool:
        """Store the lengths in a batch, and return whether there are enough packs to draw."""
        if not self._waiting:
            return False
        for stats, lengths in microbatches(batch):
            if isinstance(lengths, tuple):  # the lengths of padded rows are on the device
                self._packs.append(lengths)
                self._patches.append(stats.vision_patches)
                self._capacity = max(self._capacity, stats.slots)
        return len(self._packs) >= PACKS

    def show(self, loggers: Iterable[Logger], step: int) -> None:
        """Draw the stored packs into loggers that take pictures, then wait for the next epoch."""
        packs, self._packs, self._waiting = self._packs[:PACKS], [], False
        if not packs:
            return
        held = [getattr(pack, "held", (0,) * len(pack)) for pack in packs]
        figure = draw_packs(packs[:_LANES], self._capacity, held=held[:_LANES], width=_INCHES)
        lengths = np.asarray([length for pack in packs for length in pack])
        used = [sum(pack) - sum(shared) for pack, shared in zip(packs, held, strict=True)]
        shown = {_LENGTHS: lengths, _FILL: np.asarray(used) / self._capacity}
        if any(patches := self._patches[:PACKS]):
            shown[_PATCHES] = np.asarray(patches)
        histograms = {key: values for key, values in shown.items() if len(values)}
        _show(_DRAWN, figure, loggers, step, histograms)


def show_load(counts: npt.NDArray[np.int64], loggers: Iterable[Logger], step: int) -> None:
    """Draw how often experts were chosen, ``[L, E]``, into loggers that take pictures; rank 0 has loggers."""
    _show(_LOAD, draw_load(counts, width=_INCHES), loggers, step, {})


def warn_without_loggers(loggers: Sequence[Logger]) -> None:
    """Warn that no logger takes pictures."""
    if not any(isinstance(logger, (TensorBoardLogger, WandbLogger)) for logger in loggers):
        names = ", ".join(type(logger).__name__ for logger in loggers) or "none"
        rank_zero_warn(
            f"pictures=True, but no logger of the Trainer takes pictures (it has {names}). Add a "
            "TensorBoardLogger or a WandbLogger, or leave pictures out."
        )


def _show(name: str, figure: Any, loggers: Iterable[Logger], step: int, histograms: dict[str, Any]) -> None:
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            wandb = require("wandb", feature="WandbLogger")
            shown = {name: wandb.Image(figure)}
            shown |= {key: wandb.Histogram(values) for key, values in histograms.items()}
            logger.log_metrics(shown, step=step)
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(name, figure, step)
            for key, values in histograms.items():
                logger.experiment.add_histogram(key, values, step)
