"""What real loggers keep of the monitor's values: event files, CSV and W&B's offline runs, read back."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

from lightning_thd import THDDataModule
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


def test_tensorboard_shows_mfu_tokens_and_loss_first(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar import layout_pb2

    clock, logger = Clock(), TensorBoardLogger(tmp_path)
    trainer(tmp_path, monitor(clock), logger=logger).fit(Module(clock), loader(UNEQUAL))
    logger.experiment.flush()
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    [event] = events.Tensors("custom_scalars__config__")
    [page] = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0]).category
    assert [chart.title for chart in page.chart][:3] == ["MFU", "real tokens/s of a device", "loss"]
    assert page.chart[0].multiline.tag == [MFU]


def test_fill_is_the_share_of_the_capacity(tmp_path: Path) -> None:
    clock, rows = Clock(), [{"input_ids": [1] * length} for length in (5, 3, 7, 2)]
    measured = monitor(clock)
    trainer(tmp_path, measured).fit(Module(clock), THDDataModule(rows, capacity=10))
    assert measured.latest["train/packing/fill"] == pytest.approx(17 / 20)
    assert measured.latest["train/lengths"] == 17
