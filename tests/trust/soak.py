"""Train for minutes with everything on, and see whether memory, files, threads or speed drift.

Everything: an endless stream, validation, checkpoints, TensorBoard and W&B, recorded CUDA graphs.
``python -m tests.trust.soak --minutes 30`` writes its table into ``benchmarks/TRUST.md``.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import sys
import tempfile
import threading
import time
import warnings
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from torch import Tensor

from lightning_thd import (
    CUDAGraphCallback,
    Packs,
    THDBatch,
    THDDataModule,
    THDThroughputMonitor,
    causal_lm_loss,
)
from lightning_thd.data.streams import Stream
from tests.tiny import TinyModule, sequences
from tests.trust.record import record

_WARM_UP = 0.25  # share of the run that allocators and caches are given
_SAMPLE_S = 2.0
_FIRST = 40  # steps that are sampled one by one
_COLUMNS = 6


class Watch(L.Callback):
    """Samples what may drift, and stops when the time is over."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.started = time.monotonic()
        self.samples = array("d")  # seconds, MiB, open files, threads, steps, CPU seconds; 48 bytes a sample

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        now = time.monotonic() - self.started
        early = trainer.global_step < _FIRST
        if early or now - self.samples[-_COLUMNS] >= _SAMPLE_S:
            gc.collect()
            files = len(os.listdir("/proc/self/fd"))
            threads = threading.active_count()
            self.samples.extend((now, resident_mib(), files, threads))
            self.samples.extend((trainer.global_step, time.process_time()))
        trainer.should_stop = now > self.seconds


class Captured(TinyModule):
    """Reads of a batch what a graph may read, and keeps nothing of it."""

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        return causal_lm_loss(self.model, batch)

    def on_train_batch_end(self, *args: Any) -> None:
        """Keep no losses: a list of them grows by 1 MiB an hour."""


def resident_mib() -> float:
    """Read this process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def soak(minutes: float, folder: Path, max_steps: int = -1, *, wandb: bool = True) -> dict[str, float]:
    """Train, validate, checkpoint and log for so many minutes; return what drifts."""
    torch.manual_seed(0)
    watch = Watch(60 * minutes)
    data = THDDataModule(
        Stream(endless, steps_per_epoch=500), capacity=256, global_batch=Packs(1), val=sequences(64, seed=1)
    )

    graphs = CUDAGraphCallback(max_sequences=(24, 48), backend="recording")
    trainer = L.Trainer(
        strategy="thd",
        accelerator="cpu",
        max_epochs=-1,
        max_steps=max_steps,
        val_check_interval=100,
        callbacks=[
            watch,
            graphs,
            THDThroughputMonitor(peak=1e12, every_n_steps=10),
            ModelCheckpoint(folder, every_n_train_steps=200, save_last="link", save_top_k=2, monitor="step"),
        ],
        logger=[
            TensorBoardLogger(folder, name="tensorboard"),
            *([WandbLogger(save_dir=folder, offline=True)] if wandb else []),
        ],
        log_every_n_steps=10,
        enable_progress_bar=False,
        enable_model_summary=False,
    )

    trainer.fit(Captured(), data)
    if wandb:
        trainer.loggers[1].experiment.finish()
    replayed = graphs.step.stats.hit_rate if graphs.step is not None else 0.0
    return {**drift(np.array(watch.samples).reshape(-1, _COLUMNS)), "graph hit rate": replayed}


_COUNTS = ("steps", "open files more", "threads more")


def endless() -> Iterator[dict[str, Any]]:
    """Give short sequences for ever, the same ones in every run."""
    for seed in itertools.count():
        yield from sequences(256, labels=True, seed=seed)


def drift(samples: np.ndarray) -> dict[str, float]:
    """Compare the warm beginning of a run with its end, from rows of samples."""
    warm = samples[samples[:, 0] >= _WARM_UP * samples[-1, 0]]
    seconds = warm[:, 0] - warm[:, 0].mean()
    memory = warm[:, 1] - warm[:, 1].mean()
    slope = float(seconds @ memory / max(seconds @ seconds, 1e-9)) * 3600

    half = len(warm) // 2
    parts = (warm[:half], warm[half:])
    per_step = [np.diff(part[:, 5]).sum() / max(np.diff(part[:, 4]).sum(), 1) for part in parts]

    return {
        "steps": float(samples[-1, 4]),
        "memory MiB an hour": slope,
        "open files more": float(warm[-1, 2] - warm[0, 2]),
        "threads more": float(warm[-1, 3] - warm[0, 3]),
        "CPU ms a step, first half": 1e3 * float(per_step[0]),
        "CPU ms a step, second half": 1e3 * float(per_step[1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        measured = soak(options.minutes, Path(folder))

    slower = measured["CPU ms a step, second half"] / measured["CPU ms a step, first half"] - 1
    goals = {
        "memory flat (below 1 MiB an hour)": measured["memory MiB an hour"] < 1,
        "files and threads flat": measured["open files more"] <= 0 and measured["threads more"] <= 0,
        "second half within 3 % of the first": slower < 0.03,
        "most steps were replayed from a recorded graph": measured["graph hit rate"] > 0.9,
    }

    shown: dict[str, Any] = {"minutes": options.minutes}
    for name, value in measured.items():
        shown[name] = f"{value:,.0f}" if name in _COUNTS else f"{value:,.2f}"
    record("soak", {**shown, **{goal: "yes" if met else "NO" for goal, met in goals.items()}})
    sys.exit(0 if all(goals.values()) else 1)


if __name__ == "__main__":
    main()
