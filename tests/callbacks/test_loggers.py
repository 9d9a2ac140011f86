"""What real loggers keep of the monitor's values: event files, CSV and W&B's offline runs, read back."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

from tests.callbacks.fits import UNEQUAL, Clock, Memory, Module, loader, monitor, trainer
from tests.trackers import read_tensorboard, read_wandb

MFU = "train/device/mfu"


def test_loggers_keep_the_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    clock, memory = Clock(), Memory()
    loggers = [
        TensorBoardLogger(tmp_path / "board"),
        CSVLogger(tmp_path / "csv"),
        WandbLogger(save_dir=tmp_path, offline=True),
        memory,
    ]
    measured = monitor(clock, all_keys=False)
    trainer(tmp_path, measured, logger=loggers).fit(Module(clock), loader(UNEQUAL))
    loggers[2].experiment.finish()

    wanted = [(step, row[MFU]) for step, row in memory.rows]
    assert len(wanted) == 3
    board = read_tensorboard(tmp_path / "board")[MFU]
    assert [step for step, _ in board] == [step for step, _ in wanted]
    assert [value for _, value in board] == pytest.approx([value for _, value in wanted])
    (file,) = (tmp_path / "csv").rglob("metrics.csv")
    with file.open() as text:
        rows = list(csv.DictReader(text))
    assert [(int(row["step"]), float(row[MFU])) for row in rows if row[MFU]] == wanted
    short = {key for _, row in memory.rows for key in row}
    assert {MFU, "train/device/real_items_per_sec", "train/packing/fill", "train/total_flops"} < short
    assert {"train/device/batches_per_sec", "train/time"} <= measured.latest.keys() - short
    rows = read_wandb(tmp_path)
    assert [(row["trainer/global_step"], row[MFU]) for row in rows if MFU in row] == wanted
