"""Checkpoints written in the background hold what they were begun with, and a kill leaves the one before."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.checkpoint import FileSystemWriter

from lightning_thd import Sequences, THDDDPStrategy
from tests.ranks import RankError, run_ranks
from tests.strategies.jobs import Job, Layout, data, full_parameters, make_trainer
from tests.tiny import largest_error, sequences

STEP, STEPS = Sequences(12), 5
BEHIND = Layout(dp=2, options={"asynchronous_checkpoints": True})


def slow(kind: str, monkeypatch_at: int) -> None:
    """Make every checkpoint take longer than a step, and one of them end its rank, or fail."""
    write, calls = FileSystemWriter.write_data, [0]

    def late(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        time.sleep(0.5)
        if calls[0] == monkeypatch_at and kind == "kill":
            time.sleep(2.0)  # training is over by now, had it not to wait
            os._exit(9)
        if calls[0] == monkeypatch_at and kind == "fail":
            raise OSError("no space left on device")
        return write(self, *args, **kwargs)

    FileSystemWriter.write_data = late  # type: ignore[method-assign]


def train(layout: Layout, folder: str, kind: str, keep: int) -> dict[str, Any]:
    """Train with a checkpoint every second step; say when the last one was whole."""
    warnings.filterwarnings("ignore")
    if kind in ("kill", "fail", "slow"):
        slow(kind, 2 if kind != "kill" or dist.get_rank() == 1 else -1)
    module = Job()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=keep, save_last=True)
    plugins = [AsyncCheckpointIO()] if kind == "plugin" else []
    options: dict[str, Any] = {"callbacks": [saver], "plugins": plugins, "enable_checkpointing": True}
    trainer = make_trainer(layout, max_steps=STEPS, **options)
    behind = []
    module.on_train_batch_end = lambda *_: behind.append(  # type: ignore[method-assign]
        (trainer.global_step, sorted(path.name for path in Path(folder).glob("*")))
    )
    trainer.fit(module, data(STEP, val=sequences(8, seed=7)))
    return {"params": full_parameters(module.model), "behind": behind}


def resumed(layout: Layout, path: str) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    module = Job()
    trainer = make_trainer(layout, max_steps=STEPS)
    trainer.fit(module, data(STEP, val=sequences(8, seed=7)), ckpt_path=path)
    return full_parameters(module.model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["slow", "plugin"])
def test_a_checkpoint_holds_what_it_was_begun_with(kind: str, tmp_path: Path) -> None:
    layout = BEHIND if kind != "plugin" else Layout(dp=2)
    first, _ = run_ranks(train, 2, layout, str(tmp_path), kind, -1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "step=2.ckpt", "step=4.ckpt"]
    if kind == "slow":  # the third step began before the checkpoint of the second was whole
        assert (3, [".last.ckpt.part", "step=2.ckpt"]) in first["behind"] or (
            3,
            [".step=2.ckpt.part"],
        ) in first["behind"]
    for found in run_ranks(resumed, 2, Layout(dp=2), str(tmp_path / "step=2.ckpt")):
        assert largest_error(found, first["params"]) < 1e-12


def test_a_kill_while_writing_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank"):
        run_ranks(train, 2, BEHIND, str(tmp_path), "kill", 1)
    assert not (tmp_path / "last.ckpt").exists()
    [wanted] = run_ranks(train, 1, Layout(), str(tmp_path / "one"), "", 0)
    for found in run_ranks(resumed, 2, BEHIND, str(tmp_path / "step=2.ckpt")):
        assert largest_error(found, wanted["params"]) < 1e-10


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_ends_the_job(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"no space left on device"):
        run_ranks(train, 2, BEHIND, str(tmp_path), "fail", 1)
    assert (tmp_path / "step=2.ckpt").is_dir()


class Behind(THDDDPStrategy):
    asynchronous_checkpoints = True


def refusals(folder: str) -> list[str]:
    found = []
    linked = ModelCheckpoint(folder, every_n_train_steps=1, save_last="link")
    ways: list[tuple[Layout, dict[str, Any]]] = [
        (BEHIND, {"callbacks": [linked], "enable_checkpointing": True}),
        (Layout(strategy="thd_ddp"), {"strategy": Behind()}),
    ]
    for layout, options in ways:
        try:
            make_trainer(layout, **{**options, "devices": 1}).fit(Job(), data(STEP))
        except MisconfigurationException as err:
            found.append(str(err))
    return found


def test_what_cannot_be_written_behind_is_refused(tmp_path: Path) -> None:
    [(linked, whole)] = run_ranks(refusals, 1, str(tmp_path))
    assert linked.startswith(
        "ModelCheckpoint(save_last='link') with checkpoints that are written in the back"
    )
    assert whole.startswith("asynchronous_checkpoints=True under Behind, which writes one file")
