"""Lightning's averaging callbacks, learning rate finder and norms on sharded weights equal one process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.tuner import Tuner
from torch import Tensor

from lightning_thd import Sequences
from lightning_thd.strategies.norms import grad_norm
from tests.ranks import run_ranks
from tests.strategies.jobs import Job, Layout, data, full_parameters, make_trainer
from tests.tiny import largest_error, sequences

STEP = Sequences(12)
LAYOUTS = {
    "dp2": Layout(dp=2),
    "cp2": Layout(cp=2),
    "tp2": Layout(tp=2),
    "ddp": Layout(strategy="thd_ddp", dp=2),
}


class Normed(Job):
    """A module that keeps the norms of its gradients, as Lightning's documentation shows."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[dict[str, float]] = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norms.append({name: float(norm) for name, norm in grad_norm(self.model, 2).items()})


def run(layout: Layout | None, kind: str, folder: str) -> dict[str, Any]:
    """Train with a callback on this layout, or on one process without one."""
    warnings.filterwarnings("ignore")
    module = Normed()
    callbacks: list[Any] = {
        "ema": lambda: [EMAWeightAveraging(decay=0.5)],
        "swa": lambda: [StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=1)],
        "resume": lambda: [
            EMAWeightAveraging(decay=0.5),
            ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1),
        ],
    }[kind]()
    options: dict[str, Any] = {"max_steps": 5, "val_check_interval": 2, "num_sanity_val_steps": 1}
    options |= {"callbacks": callbacks, "enable_checkpointing": kind == "resume"}
    if kind == "swa":
        options |= {"max_steps": -1, "max_epochs": 3, "limit_train_batches": 2}
    if layout is None:
        options["strategy"] = "thd"
    trainer = make_trainer(layout or Layout(), **options)
    given = data(STEP, val=sequences(8, seed=7))
    trainer.fit(module, given)
    found = {
        "params": full_parameters(module.model),
        "val": float(trainer.callback_metrics["val/loss"]),
        "norms": module.norms,
    }
    if kind == "resume":
        again = Job()
        options |= {"callbacks": [EMAWeightAveraging(decay=0.5)], "enable_checkpointing": False}
        trainer = make_trainer(layout or Layout(), **options)
        trainer.fit(again, given, ckpt_path=f"{folder}/step=2.ckpt")
        found["resumed"] = full_parameters(again.model)
    return found


CASES = [(name, kind) for name in LAYOUTS for kind in ("ema", "swa", "resume")]
SHARP = [("tp2", "resume")]


@pytest.mark.parametrize(
    ("name", "kind"), [pytest.param(*c, marks=[] if c in SHARP else pytest.mark.slow) for c in CASES]
)
def test_averages_and_norms_equal_one_process(name: str, kind: str, tmp_path: Path) -> None:
    [wanted] = run_ranks(run, 1, None, kind, str(tmp_path / "one"))
    for found in run_ranks(run, 2, LAYOUTS[name], kind, str(tmp_path / "two")):
        assert largest_error(found["params"], wanted["params"]) < 1e-10
        assert found["val"] == pytest.approx(wanted["val"], rel=1e-6)
        if name != "ddp":
            for norms, expected in zip(found["norms"], wanted["norms"], strict=True):
                assert norms == pytest.approx(expected, rel=1e-8)
        if kind == "resume":
            assert largest_error(found["resumed"], wanted["params"]) < 1e-10


def find_rate(layout: Layout) -> tuple[Any, dict[str, Tensor]]:
    warnings.filterwarnings("ignore")
    module = Job()
    module.lr = 1e-3
    before = full_parameters(module.model)
    trainer = make_trainer(layout, gradient_clip_val=None, max_steps=8)
    found = Tuner(trainer).lr_find(module, data(STEP), num_training=6, min_lr=1e-5)
    assert found is not None
    return found.results["loss"], {n: p - before[n] for n, p in full_parameters(module.model).items()}


@pytest.mark.parametrize("name", ["dp2", pytest.param("tp2", marks=pytest.mark.slow)])
def test_the_learning_rate_finder_leaves_the_weights_as_they_were(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for losses, changes in run_ranks(find_rate, 2, LAYOUTS[name]):
        assert len(losses) == 6
        assert max(float(change.abs().max()) for change in changes.values()) == 0.0
