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
from tests.tiny import TinyModule, quiet_trainer, sequences

SETS = {"code": sequences(9, seed=1), "prose": sequences(4, seed=2)}
CAPACITY = 48


class Mine(TinyModule):
    """Logs by the names that its batches carry; a rate of zero, so that nothing ever improves."""

    def __init__(self) -> None:
        super().__init__(lr=0.0)
        self.names: list[str] = []

    def validation_step(self, batch: THDBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.names.append(batch.set_name)
        loss = causal_lm_loss(self.model, batch)
        self.log(f"val/loss/{batch.set_name}", loss, sync_dist=True, add_dataloader_idx=False)

    test_step = validation_step


def fit_until_stopped(folder: str, strategy: str) -> dict[str, Any]:
    warnings.filterwarnings("ignore", ".*(accelerator|num_workers|does not have many workers).*")
    stop = EarlyStopping("val/loss/code", patience=2, verbose=False)
    keep = ModelCheckpoint(folder, monitor="val/loss/prose", filename="best-{epoch}")
    trainer = quiet_trainer(
        max_epochs=9,
        strategy=strategy,
        devices=dist.get_world_size(),
        callbacks=[stop, keep],
        enable_checkpointing=True,
    )
    module = Mine()
    batch = Sequences(4) if strategy.startswith("thd") else None
    data = THDDataModule(sequences(12), capacity=CAPACITY, val=SETS, global_batch=batch)
    trainer.fit(module, data)
    return {
        "epochs": trainer.current_epoch,
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val/")},
        "names": set(module.names),
        "kept": Path(keep.best_model_path).name,
    }


def by_hand(rows: list[dict[str, Any]]) -> float:
    model, total, tokens = Mine().model.eval(), 0.0, 0
    for row in rows:
        ids = torch.as_tensor(row["input_ids"])[None]
        if ids.shape[1] > 1:
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
            tokens += ids.shape[1] - 1
    return total / tokens


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [(2, "thd_ddp"), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((1, "ddp"), (2, "ddp")))],
)
def test_a_module_logs_a_metric_a_set_for_early_stopping_and_checkpoints(
    tmp_path: Path, ranks: int, strategy: str
) -> None:
    wanted = {f"val/loss/{name}": by_hand(rows) for name, rows in SETS.items()}
    for found in run_ranks(fit_until_stopped, ranks, str(tmp_path), strategy):
        assert found["metrics"] == pytest.approx(wanted, rel=1e-6)
        assert found["names"] == {"code", "prose"}
        assert found["epochs"] == 3  # the first and two that were no better
        assert found["kept"] == "best-epoch=0.ckpt"
