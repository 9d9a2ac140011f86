"""A fit that is broken off anywhere and resumed trains on the sequences of one that was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn

from lightning_thd import THDBatch, THDDataModule
from tests.data.support import Rows, make_trainer

LENGTH, ROWS, EPOCHS = 4, 7, 2
LIMITS = ("none", "below", "above", "not a multiple")


class Records(L.LightningModule):
    """Records each batch with its epoch, and where the optimizer steps; saves after each batch and epoch."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self.weight, self.folder = nn.Parameter(torch.ones(())), folder
        self.events: list[Any] = []
        self.saved: dict[Path, int] = {}  # checkpoint -> events before the first that a resumed fit repeats

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        self.events.append((self.current_epoch, batch.input_ids.tolist()))
        return self.weight * batch.input_ids.sum() * batch.loss_scale

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.events.append("step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._save("batch")

    def on_train_epoch_end(self) -> None:
        self._save("epoch")

    def on_train_end(self) -> None:
        self._save("end")

    def _save(self, name: str) -> None:
        if self.folder is not None:
            path = self.folder / f"{name}{len(self.saved)}.ckpt"
            self.trainer.save_checkpoint(path)
            whole = [at for at, event in enumerate(self.events, 1) if event == "step"]
            self.saved[path] = whole[-1] if whole else 0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def source(kind: str) -> Any:
    rows = [{"input_ids": [i] * LENGTH} for i in range(9)]
    if kind == "map":
        return rows[:ROWS]
    if kind == "stream":
        return Rows(*rows[:ROWS])
    a, b = (rows[:4], rows[4:]) if kind == "mixture" else (Rows(*rows[:4]), Rows(*rows[4:]))
    return {"a": (a, 0.5), "b": (b, 0.5)}


def fit(module: Records, kind: str, accumulate: int, limit: str, *, epochs: int, path: Any = None) -> None:
    batches = {"none": None, "below": accumulate, "above": 24, "not a multiple": accumulate + 1}[limit]
    trainer = make_trainer(max_epochs=epochs, accumulate_grad_batches=accumulate, limit_train_batches=batches)
    trainer.fit(module, THDDataModule(source(kind), capacity=LENGTH), ckpt_path=path)
    if path is None:
        module.trainer = trainer
        module._save("finished")


def check(kind: str, accumulate: int, limit: str, folder: Path, *, only: tuple[str, ...] = ()) -> int:
    """Resume from every checkpoint of a fit, for as many epochs and one more; return how many were tried."""
    whole, longer = Records(folder), Records()
    fit(whole, kind, accumulate, limit, epochs=EPOCHS)
    fit(longer, kind, accumulate, limit, epochs=EPOCHS + 1)
    assert longer.events[: len(whole.events)] == whole.events
    tried = 0
    for path, begun in whole.saved.items():
        if only and path.stem not in only:
            continue
        for epochs, wanted in ((EPOCHS, whole.events), (EPOCHS + 1, longer.events)):
            resumed = Records()
            fit(resumed, kind, accumulate, limit, epochs=epochs, path=path)
            assert resumed.events == wanted[begun:], f"{path.stem}, {epochs} epochs"
            tried += 1
    return tried


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The stream is a generator")  # which gives the same rows again here
@pytest.mark.parametrize("kind", ["map", "mixture", "stream", "streamed mixture"])
@pytest.mark.parametrize("accumulate", [1, 2, 3, 4])
@pytest.mark.parametrize("limit", LIMITS)
def test_a_resumed_fit_trains_on_what_is_left(kind: str, accumulate: int, limit: str, tmp_path: Path) -> None:
    if kind.startswith("stream") and limit == "not a multiple" and accumulate > 1:
        pytest.skip("refused: a stream's steps are made whole")
    assert check(kind, accumulate, limit, tmp_path) > 8


@pytest.mark.filterwarnings("ignore:The stream is a generator")
@pytest.mark.parametrize(
    ("kind", "accumulate", "limit", "only"),
    [
        ("map", 3, "not a multiple", ("batch3", "epoch4", "batch6", "finished11")),
        ("mixture", 2, "none", ("batch11",)),
        ("stream", 2, "above", ("batch7", "epoch8", "batch9", "finished19")),
    ],
)
def test_a_sample_of_the_matrix(kind: str, accumulate: int, limit: str, only: Any, tmp_path: Path) -> None:
    assert check(kind, accumulate, limit, tmp_path, only=only) == 2 * len(only)
