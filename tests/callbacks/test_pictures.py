"""Pictures in the loggers, read back from real files: what they show, when, and that they cost no rates."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from torch.utils.tensorboard import SummaryWriter

from lightning_thd import THDBatch, THDDataModule
from lightning_thd.callbacks import pictures as module_under_test
from lightning_thd.callbacks.seen import microbatches
from tests.callbacks.fits import UNEQUAL, Clock, Memory, Module, loader, monitor, trainer
from tests.trackers import read_wandb

DRAWN, LENGTHS, FILL = "train/packing/packs", "train/packing/lengths", "train/packing/fill_by_pack"
STRAIGHT = {"max_epochs": 2, "log_every_n_steps": 1}


def read_pictures(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = folder.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file), size_guidance={"images": 0, "histograms": 0})
    events.Reload()
    return events


def test_event_files_hold_the_packs_of_every_epoch(tmp_path: Path) -> None:
    clock = Clock()
    run = trainer(tmp_path, monitor(clock, pictures=True), logger=TensorBoardLogger(tmp_path), **STRAIGHT)
    run.fit(Module(clock), loader(UNEQUAL))
    events = read_pictures(tmp_path)
    steps = len(UNEQUAL)
    drawn = events.Images(DRAWN)
    assert [image.step for image in drawn] == [steps, 2 * steps]
    for image in drawn:
        width, height = struct.unpack(">II", image.encoded_image_string[16:24])  # of a PNG
        assert (width, height) == (image.width, image.height)
        assert min(width, height) > 200
    lengths = sorted(n for batch in UNEQUAL for n in batch.lengths)
    for one in events.Histograms(LENGTHS):
        value = one.histogram_value
        assert (value.num, value.min, value.max, value.sum) == (
            len(lengths),
            lengths[0],
            lengths[-1],
            sum(lengths),
        )
    fill = [sum(batch.lengths) / 9 for batch in UNEQUAL]  # 9 slots in the largest pack
    assert [one.histogram_value.sum for one in events.Histograms(FILL)] == pytest.approx([sum(fill)] * 2)


def test_shared_prefixes_take_their_slots_once(tmp_path: Path) -> None:
    rows = [[1, 2, 3, 4], [1, 2], [1, 2, 5], [7, 8, 9]]
    batch = THDBatch.collate([{"input_ids": row} for row in rows], share_prefixes=True, pad_to=12)
    ((_, lengths),) = microbatches(batch)
    assert list(zip(lengths, lengths.held, strict=True)) == [(3, 0), (4, 2), (3, 0), (2, 2)]
    clock = Clock()
    run = trainer(tmp_path, monitor(clock, pictures=True), logger=TensorBoardLogger(tmp_path))
    run.fit(Module(clock), loader([batch]))
    events = read_pictures(tmp_path)
    assert events.Histograms(LENGTHS)[0].histogram_value.sum == 12
    assert events.Histograms(FILL)[0].histogram_value.sum == pytest.approx(8 / 12)


def test_many_packs_are_drawn_when_there_are_enough_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_under_test, "PACKS", 3)
    clock = Clock()
    run = trainer(tmp_path, monitor(clock, pictures=True), logger=TensorBoardLogger(tmp_path))
    run.fit(Module(clock), loader(UNEQUAL))
    events = read_pictures(tmp_path)
    assert [image.step for image in events.Images(DRAWN)] == [2]
    (one,) = events.Histograms(LENGTHS)
    assert one.histogram_value.num == sum(len(batch.lengths) for batch in UNEQUAL[:3])


def test_fill_is_of_the_capacity_of_the_data_module(tmp_path: Path) -> None:
    data = THDDataModule([{"input_ids": [1, 2, 3]}] * 8, capacity=10)
    run = trainer(tmp_path, monitor(Clock(), pictures=True), logger=TensorBoardLogger(tmp_path))
    run.fit(Module(Clock()), data)
    (one,) = read_pictures(tmp_path).Histograms(FILL)
    assert one.histogram_value.num == 3
    assert one.histogram_value.sum == pytest.approx(2.4)  # 8 sequences of 3 in packs of 10 slots


def test_wandb_keeps_the_picture_and_the_histograms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    clock, logger = Clock(), WandbLogger(save_dir=tmp_path, offline=True)
    trainer(tmp_path, monitor(clock, pictures=True), logger=logger).fit(Module(clock), loader(UNEQUAL))
    logger.experiment.finish()
    deadline, rows = time.monotonic() + 60, []
    while not rows and time.monotonic() < deadline:  # another process writes the end of the file
        rows = [row for row in read_wandb(tmp_path) if any(key.startswith(LENGTHS) for key in row)]
    (row,) = rows
    assert row["trainer/global_step"] == len(UNEQUAL)
    text = json.dumps(row)
    assert "image-file" in text
    assert "histogram" in text
    (file,) = tmp_path.rglob("*.png")
    assert file.read_bytes().startswith(b"\x89PNG")


def test_drawing_is_no_part_of_the_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_under_test, "PACKS", 2)
    clock, rows = Clock(), []
    monkeypatch.setattr(SummaryWriter, "add_figure", lambda *_: clock.sleep(10_000))
    for pictures in (False, True):
        memory = Memory()
        run = trainer(
            tmp_path, monitor(clock, pictures=pictures), logger=[memory, TensorBoardLogger(tmp_path)]
        )
        run.fit(Module(clock), loader(UNEQUAL))
        rows.append([row for _, row in memory.rows])
    assert clock.now > 10_000
    for without, drawn in zip(*rows, strict=True):
        assert drawn == pytest.approx(without, rel=1e-9)


def test_pictures_without_a_place_are_told(tmp_path: Path) -> None:
    clock = Clock()
    run = trainer(tmp_path, monitor(clock, pictures=True), logger=CSVLogger(tmp_path))
    with pytest.warns(UserWarning, match=r"no logger of the Trainer takes pictures \(it has CSVLogger\)"):
        run.fit(Module(clock), loader(UNEQUAL[:1]))


def test_a_development_run_draws_nothing_and_says_nothing(tmp_path: Path) -> None:
    clock = Clock()
    trainer(tmp_path, monitor(clock, pictures=True), fast_dev_run=True).fit(Module(clock), loader(UNEQUAL))


def test_pictures_need_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pictures=True needs the package 'matplotlib'"):
        monitor(Clock(), pictures=True)
