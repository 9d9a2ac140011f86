"""Averaged weights that are resumed, and norms, on sharded weights equal one process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

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


def run(layout: Layout | None, folder: str) -> dict[str, Any]:
    """Train and resume on this layout, or on one process."""
    warnings.filterwarnings("ignore")
    module, again = Normed(), Job()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    given, averages = data(STEP, val=sequences(8, seed=7)), EMAWeightAveraging(decay=0.5)
    options: dict[str, Any] = {"max_steps": 3, "val_check_interval": 2, "num_sanity_val_steps": 1}
    options |= {"strategy": "thd"} if layout is None else {}
    trainer = make_trainer(
        layout or Layout(), callbacks=[averages, saver], enable_checkpointing=True, **options
    )
    trainer.fit(module, given)
    resumed = make_trainer(layout or Layout(), callbacks=[EMAWeightAveraging(decay=0.5)], **options)
    resumed.fit(again, given, ckpt_path=f"{folder}/step=2.ckpt")
    return {
        "params": full_parameters(module.model),
        "resumed": full_parameters(again.model),
        "val": float(trainer.callback_metrics["val/loss"]),
        "norms": module.norms,
    }


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "tp2" else pytest.mark.slow) for name in LAYOUTS]
)
def test_averages_and_norms_equal_one_process(name: str, tmp_path: Path) -> None:
    [wanted] = run_ranks(run, 1, None, str(tmp_path / "one"))
    for found in run_ranks(run, 2, LAYOUTS[name], str(tmp_path / "two")):
        assert largest_error(found["params"], wanted["params"]) < 1e-10
        assert largest_error(found["resumed"], wanted["params"]) < 1e-10
        assert found["val"] == pytest.approx(wanted["val"], rel=1e-6)
        if name != "ddp":
            for norms, expected in zip(found["norms"], wanted["norms"], strict=True):
                assert norms == pytest.approx(expected, rel=1e-8)
