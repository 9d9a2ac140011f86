"""What a module logs of a loss is the pack's value on every rank, whatever it passes to ``self.log``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_thd import Packs, THDBatch, THDDataModule, causal_lm_loss
from lightning_thd.packing import PackPlanner
from tests.ranks import run_ranks
from tests.strategies.jobs import CAPACITY, Job, Layout, data, make_trainer
from tests.tiny import nll, sequences

SAMPLES = sequences(14, labels=True, seed=5)
LAYOUTS = {
    "ddp cp2": Layout(strategy="thd_ddp", cp=2),
    "cp2": Layout(cp=2),
    "cp2 ulysses": Layout(strategy="thd_ddp", cp=2, options={"context_parallel_communication": "ulysses"}),
}


class LogsAll(Job):
    """A module that logs its losses in every way users do."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[float] = []

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        loss = causal_lm_loss(self.model, batch)
        self.log("train/loss", loss)
        self.steps.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: THDBatch, batch_idx: int) -> None:
        self._log_all("val", causal_lm_loss(self.model, batch))

    def test_step(self, batch: THDBatch, batch_idx: int) -> None:
        self._log_all("test", causal_lm_loss(self.model, batch))

    def _log_all(self, stage: str, loss: Tensor) -> None:
        self.log(f"{stage}/loss", loss)
        self.log(f"{stage}/synced", loss, sync_dist=True)
        self.log_dict({f"{stage}/number": loss.item(), f"{stage}/twice": 2 * loss.detach()}, on_epoch=True)


def look(layout: Layout, folder: str) -> dict[str, Any]:
    """Fit with callbacks that rank on the loss, then validate and test."""
    best = ModelCheckpoint(folder, monitor="val/loss", filename="{step}", save_top_k=2, every_n_train_steps=1)
    stop = EarlyStopping("val/loss", patience=1, check_on_train_epoch_end=False)
    module = LogsAll()
    given = data(Packs(layout.dp), val=SAMPLES)
    quiet = {"num_sanity_val_steps": 0, "gradient_clip_val": None}
    trainer = make_trainer(
        layout, callbacks=[best, stop], enable_checkpointing=True, max_steps=3, val_check_interval=1, **quiet
    )
    trainer.fit(module, given)
    other = THDDataModule(capacity=CAPACITY, val=SAMPLES, test=SAMPLES)
    trainer = make_trainer(layout)
    (val,) = trainer.validate(module, other, verbose=False)
    (test,) = trainer.test(module, other, verbose=False)
    return {
        **val,
        **test,
        "steps": module.steps,
        "best": float(best.best_model_score),
        "stop": float(stop.best_score),
        "wanted": by_hand(module) if layout.strategy == "thd_ddp" else None,
    }


def by_hand(module: Job) -> float:
    model = Job().model
    model.load_state_dict(module.model.state_dict())
    with torch.no_grad():
        results = [nll(model, sample) for sample in SAMPLES]
    return float(sum(loss for loss, _ in results)) / sum(count for _, count in results)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if "ddp" not in name else []) for name in LAYOUTS]
)
def test_every_rank_logs_the_loss_of_the_pack(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    first, second = run_ranks(look, 2, layout, str(tmp_path))
    assert first == second
    for stage in ("val", "test"):
        wanted = first["wanted"] or first[f"{stage}/synced"]
        for key, factor in (("loss", 1), ("synced", 1), ("number", 1), ("twice", 2)):
            assert first[f"{stage}/{key}"] == pytest.approx(factor * wanted, rel=1e-6)
    assert first["best"] == pytest.approx(min(first["best"], first["stop"]), rel=1e-6)
    samples = sequences(80, labels=True)
    lengths = [len(sample["input_ids"]) for sample in samples]
    planner = PackPlanner(lengths, CAPACITY, global_batch=Packs(1), align=layout.align)
    results = [nll(Job().model, samples[i]) for i in planner.step(0, 0, 1).indices_by_rank()[0][0]]
    loss = sum(total for total, _ in results) / sum(count for _, count in results)
    assert first["steps"][0] == pytest.approx(float(loss.detach()), rel=1e-12)


class Sums(Job):
    """Logs sums over batches and ranks."""

    def validation_step(self, batch: THDBatch, batch_idx: int) -> None:
        loss = causal_lm_loss(self.model, batch)
        self.log("val/sum", loss, reduce_fx="sum", sync_dist=True)
        own = self.trainer.strategy.reduce(torch.ones(()), reduce_op="sum")  # a user's own is of all ranks
        self.log("val/ranks", own)


def sums(layout: Layout) -> dict[str, float] | str:
    trainer = make_trainer(layout)
    try:
        (found,) = trainer.validate(Sums(), THDDataModule(capacity=CAPACITY, val=SAMPLES), verbose=False)
    except MisconfigurationException as err:
        return str(err)
    return dict(found)


def all_sums(layouts: list[Layout]) -> list[Any]:
    return [sums(layout) for layout in layouts]


def test_a_sum_counts_once_what_ranks_of_the_same_data_have_in_common() -> None:
    [wanted] = run_ranks(sums, 1, Layout())
    for found, refusal in run_ranks(all_sums, 2, [Layout(tp=2), Layout(cp=2)]):
        assert found["val/sum"] == pytest.approx(wanted["val/sum"], rel=1e-6)
        assert found["val/ranks"] == 2 * wanted["val/ranks"]
        assert re.search(r"reduce_fx='sum', sync_dist=True\) while ranks share packs: a loss is the", refusal)
