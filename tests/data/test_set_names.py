"""Named evaluation sets in a module of one's own: every batch carries its set's name, on every rank."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_thd import Sequences, THDBatch, THDDataModule, causal_lm_loss
from tests.ranks import run_ranks
from tests.tiny import TinyModule, nll, quiet_trainer, sequences

SETS = {"code": sequences(9, seed=1), "prose": sequences(4, seed=2)}


class Mine(TinyModule):
    """Logs by the names that its batches carry; a rate of zero, so that nothing ever improves."""

    def __init__(self) -> None:
        super().__init__(lr=0.0)
        self.names: list[str] = []

    def validation_step(self, batch: THDBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.names.append(batch.set_name)
        loss = causal_lm_loss(self.model, batch)
        self.log(f"val/loss/{batch.set_name}", loss, sync_dist=True, add_dataloader_idx=False)


def fit_until_stopped(folder: str) -> tuple[Any, ...]:
    warnings.filterwarnings("ignore", ".*(accelerator|num_workers|does not have many workers).*")
    stop = EarlyStopping("val/loss/code", patience=2, verbose=False)
    keep = ModelCheckpoint(folder, monitor="val/loss/prose", filename="best-{epoch}")
    trainer = quiet_trainer(
        max_epochs=9,
        strategy="thd_ddp",
        devices=dist.get_world_size(),
        callbacks=[stop, keep],
        enable_checkpointing=True,
    )
    module = Mine()
    trainer.fit(module, THDDataModule(sequences(12), capacity=48, val=SETS, global_batch=Sequences(4)))
    metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
    return metrics, set(module.names), trainer.current_epoch, Path(keep.best_model_path).name


def test_a_module_logs_a_metric_a_set_for_early_stopping_and_checkpoints(tmp_path: Path) -> None:
    wanted = {}
    with torch.no_grad():
        for name, rows in SETS.items():
            losses = [nll(Mine().model, row) for row in rows]
            wanted[f"val/loss/{name}"] = float(sum(x for x, _ in losses)) / sum(n for _, n in losses)
    for metrics, names, epochs, kept in run_ranks(fit_until_stopped, 2, str(tmp_path)):
        assert metrics == pytest.approx(wanted, rel=1e-6)
        assert names == {"code", "prose"}
        assert epochs == 3  # the first and two that were no better
        assert kept == "best-epoch=0.ckpt"
