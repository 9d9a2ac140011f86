"""Optimizers with groups that are empty on a rank, and stages that train nothing, go on from checkpoints."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_thd import Sequences
from tests.ranks import run_ranks
from tests.strategies.jobs import Job, Layout, data, full_parameters, make_trainer


class Grouped(Job):
    """Has groups of nothing, the embedding, the head and the rest, each with a rate that falls by step."""

    rates: tuple[float, ...] = ()

    def configure_optimizers(self) -> Any:
        names = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        ends = [[p for name, p in names.items() if part in name] for part in ("embed", "lm_head")]
        rest = [p for name, p in names.items() if "embed" not in name and "lm_head" not in name]
        groups = [{"params": part, "lr": 1e-3 * (i + 1)} for i, part in enumerate([[], *ends, rest])]
        optimizer = torch.optim.AdamW(groups, eps=1e-5)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_end(self) -> None:
        self.rates = tuple(group["lr"] for group in self.trainer.optimizers[0].param_groups)


class Thaw(BaseFinetuning):
    """Trains the last layer alone, nothing on the first stage, and the head from the second epoch on."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        model: Any = pl_module.model
        self.freeze([model.model.embed_tokens, model.model.layers[0], model.lm_head])

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: Any) -> None:
        model: Any = pl_module.model
        if epoch >= 1:
            self.make_trainable(model.lm_head)
        if epoch == 1:
            optimizer.add_param_group({"params": list(model.lm_head.parameters()), "lr": 1e-2})


def fit(layout: Layout, thaws: bool, epochs: int, path: str | None = None, **options: Any) -> Grouped:
    module = Grouped()
    callbacks = [*options.pop("callbacks", []), *([Thaw()] if thaws else [])]
    options |= {"max_steps": -1, "max_epochs": epochs, "limit_train_batches": 1, "callbacks": callbacks}
    make_trainer(layout, **options).fit(module, data(Sequences(8)), ckpt_path=path)
    return module


def go_on(layout: Layout, folder: str, thaws: bool) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, save_on_train_epoch_end=True)
    fit(layout, thaws, 2, callbacks=[saver], enable_checkpointing=True)
    module = fit(layout, thaws, 3, str(Path(folder) / "step=2.ckpt"))
    return {"params": full_parameters(module.model), "rates": module.rates}


def straight(thaws: bool) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    module = fit(Layout(), thaws, 3, strategy="thd")
    return {"params": full_parameters(module.model), "rates": module.rates}


ONE = [Layout(), Layout(options={"save_distributed_checkpoint": False})]  # a folder, and a file


def go_on_all(layouts: list[Layout], folder: str, thaws: bool) -> list[dict[str, Any]]:
    return [go_on(layout, f"{folder}/{i}", thaws) for i, layout in enumerate(layouts)]


@pytest.mark.parametrize(
    ("layouts", "thaws"),
    [
        pytest.param([Layout(pp=2)], False, marks=pytest.mark.slow),
        ([Layout(pp=2)], True),
        pytest.param(ONE, False, marks=pytest.mark.slow),
    ],
    ids=["stages", "stages that thaw", "one process"],
)
def test_a_resume_keeps_groups_and_states(layouts: list[Layout], thaws: bool, tmp_path: Path) -> None:
    [wanted] = run_ranks(straight, 1, thaws)
    seen = set()
    ranks = run_ranks(go_on_all, layouts[0].world, layouts, str(tmp_path), thaws)
    for found in (found for rank in ranks for found in rank):
        assert found["rates"] == pytest.approx(wanted["rates"], rel=1e-12)
        for name, value in found["params"].items():
            assert torch.allclose(value, wanted["params"][name], rtol=1e-10, atol=1e-12), name
            seen.add(name)
    assert seen == set(wanted["params"])


class TrainedAlone(Job):
    """Gives its optimizer what is trained: nothing on the first stage."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad])


class AddsOnOneStage(Thaw):
    """Adds a group where there is something to add, as Lightning's ``unfreeze_and_add_param_group`` does."""

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: Any) -> None:
        if list(pl_module.model.lm_head.parameters()):  # type: ignore[union-attr,operator]
            super().finetune_function(pl_module, epoch, optimizer)


def refused(kind: type[Job], callback: L.Callback, folder: str) -> str:
    warnings.filterwarnings("ignore")
    saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, save_on_train_epoch_end=True)
    options: dict[str, Any] = {"max_steps": -1, "max_epochs": 2, "limit_train_batches": 1}
    trainer = make_trainer(Layout(pp=2), callbacks=[callback, saver], enable_checkpointing=True, **options)
    try:
        trainer.fit(kind(), data(Sequences(8)))
    except (MisconfigurationException, ValueError, RuntimeError) as err:
        return f"{type(err).__name__}: {err}"
    return "nothing was raised"


@pytest.mark.parametrize(
    ("kind", "callback", "message"),
    [
        (TrainedAlone, Thaw(), "no parameters on pipeline stage 0, whose layers are all frozen. Give it the"),
        (
            Grouped,
            AddsOnOneStage(),
            "parameter groups on the stages of the pipeline. Make the same groups",
        ),
    ],
)
def test_what_stages_cannot_agree_on(
    kind: type[Job], callback: L.Callback, message: str, tmp_path: Path
) -> None:
    assert message in run_ranks(refused, 2, kind, callback, str(tmp_path))[0]
