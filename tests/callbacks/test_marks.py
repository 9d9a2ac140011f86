"""Where the time of a step goes: parts add up to the whole, and each has what happened in it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_thd import THDDataModule, THDThroughputMonitor
from lightning_thd.callbacks.monitor import PARTS, StepMarks
from lightning_thd.report import read_metrics
from tests.callbacks.fits import Clock
from tests.tiny import TinyModule, quiet_trainer, sequences

SLOW_S = 0.05


class Loader:
    waited_s = 0.0


def test_the_parts_of_a_step() -> None:
    clock, loader = Clock(), Loader()
    marks = StepMarks(clock)
    for _ in range(2):
        marks.waited(loader)
        marks.mark("other")
        clock.sleep(5.0)
        marks.mark("forward_backward")
        clock.sleep(1.0)
        marks.mark("optimizer")
        marks.end_step()
        clock.sleep(0.25)
        marks.mark("other")
        clock.sleep(0.5)
        marks.mark("checkpoint")
        clock.sleep(7.0)
        marks.skip()
        clock.sleep(2.0)
        loader.waited_s += 2.0
    marks.waited(loader)
    marks.mark("other")
    found = marks.close()
    assert found == {
        "train/step_time/data_wait": 2.0,
        "train/step_time/forward_backward": 5.0,
        "train/step_time/optimizer": 1.0,
        "train/step_time/checkpoint": 0.5,
        "train/step_time/other": 0.25,
    }
    assert marks.close() == {}


class SlowData(list[Any]):
    def __getitem__(self, i: Any) -> Any:
        time.sleep(SLOW_S / 4)
        return super().__getitem__(i)


class SlowModule(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(2 * SLOW_S)
        return super().training_step(batch, batch_idx)


def test_a_run_logs_where_its_time_goes(tmp_path: Path) -> None:
    samples = SlowData(sequences(48))
    trainer = quiet_trainer(
        max_steps=8,
        logger=CSVLogger(tmp_path),
        log_every_n_steps=2,
        enable_checkpointing=True,
        callbacks=[
            THDThroughputMonitor(peak=1e12),
            ModelCheckpoint(tmp_path / "kept", every_n_train_steps=2),
        ],
    )
    began = time.perf_counter()
    trainer.fit(SlowModule(), THDDataModule(samples, capacity=48))
    took = time.perf_counter() - began
    series = read_metrics(tmp_path)
    mean = {part: sum(v for _, v in series[f"train/step_time/{part}"]) / 4 for part in PARTS}
    assert mean["forward_backward"] > 2 * SLOW_S
    assert mean["data_wait"] > SLOW_S / 4  # at least one row a pack
    assert mean["checkpoint"] > 0
    assert sum(mean.values()) * 8 < took
    assert trainer.callback_metrics["train/step_time/optimizer"] == pytest.approx(
        series["train/step_time/optimizer"][-1][1]
    )


def test_a_checkpoint_inside_an_evaluation_starts_no_part_of_the_step() -> None:
    clock = Clock()
    monitor = THDThroughputMonitor(clock=clock)
    with monitor.paused():  # no training clock runs
        monitor._marks.mark("checkpoint")
    clock.sleep(100)  # the rest of the evaluation
    monitor._marks.mark("other")
    monitor._marks.end_step()
    assert sum(monitor._marks.close().values()) == 0.0
