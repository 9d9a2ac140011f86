"""Optimizers with groups that are empty on a rank, and stages that train nothing, go on from checkpoints."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
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


def fit(layout: Layout, epochs: int, path: str | None = None, **options: Any) -> Grouped:
    module = Grouped()
    options |= {"max_steps": -1, "max_epochs": epochs, "limit_train_batches": 1}
    make_trainer(layout, **options).fit(module, data(Sequences(8)), ckpt_path=path)
    return module


def go_on(layout: Layout, folder: str) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, save_on_train_epoch_end=True)
    fit(layout, 2, callbacks=[saver], enable_checkpointing=True)
    module = fit(layout, 3, str(Path(folder) / "step=2.ckpt"))
    return {"params": full_parameters(module.model), "rates": module.rates}


def straight() -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    module = fit(Layout(), 3, strategy="thd")
    return {"params": full_parameters(module.model), "rates": module.rates}


@pytest.mark.parametrize(
    "layout", [Layout(pp=2), pytest.param(Layout(), marks=pytest.mark.slow)], ids=["stages", "one process"]
)
def test_a_resume_keeps_groups_and_states(layout: Layout, tmp_path: Path) -> None:
    [wanted] = run_ranks(straight, 1)
    seen = set()
    for found in run_ranks(go_on, layout.world, layout, str(tmp_path)):
        assert found["rates"] == pytest.approx(wanted["rates"], rel=1e-12)
        for name, value in found["params"].items():
            assert torch.allclose(value, wanted["params"][name], rtol=1e-10, atol=1e-12), name
            seen.add(name)
    assert seen == set(wanted["params"])


class TrainedAlone(Job):
    """Gives its optimizer what is trained: nothing on the first stage."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        model: Any = self.model
        for part in (model.model.embed_tokens, model.model.layers[0]):
            part.requires_grad_(False)
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def refused() -> str:
    warnings.filterwarnings("ignore")
    try:
        make_trainer(Layout(pp=2), max_steps=1).fit(TrainedAlone(), data(Sequences(8)))
    except (MisconfigurationException, RuntimeError) as err:  # on other stages the connection ends
        return str(err)
    return "nothing was raised"


def test_a_stage_that_trains_nothing() -> None:
    wanted = "no parameters on pipeline stage 0, whose layers are all frozen. Give it the"
    assert wanted in run_ranks(refused, 2)[0]
