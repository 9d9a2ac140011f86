"""Optimizers with parameter groups that are empty, here or on other ranks, go on from checkpoints."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_thd import Sequences
from tests.ranks import run_ranks
from tests.strategies.jobs import Job, Layout, data, full_parameters, make_trainer


class Grouped(Job):
    """Has groups of nothing, the embedding, the head and the rest, each with a rate that falls by step."""

    rates: tuple[float, ...] = ()

    def configure_optimizers(self) -> Any:
        names = dict(self.model.named_parameters())
        ends = [[p for name, p in names.items() if part in name] for part in ("embed", "lm_head")]
        rest = [p for name, p in names.items() if "embed" not in name and "lm_head" not in name]
        groups = [{"params": part, "lr": 1e-3 * (i + 1)} for i, part in enumerate([[], *ends, rest])]
        optimizer = torch.optim.AdamW(groups, eps=1e-5)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_end(self) -> None:
        self.rates = tuple(group["lr"] for group in self.trainer.optimizers[0].param_groups)


def go_on(layout: Layout, folder: str) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    first = make_trainer(layout, max_steps=2, callbacks=[saver], enable_checkpointing=True)
    first.fit(Grouped(), data(Sequences(8)))
    module = Grouped()
    make_trainer(layout, max_steps=4).fit(
        module, data(Sequences(8)), ckpt_path=str(Path(folder) / "step=2.ckpt")
    )
    return {"params": full_parameters(module.model), "rates": module.rates}


def straight() -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    module = Grouped()
    make_trainer(Layout(), strategy="thd", max_steps=4).fit(module, data(Sequences(8)))
    return {"params": full_parameters(module.model), "rates": module.rates}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2),
        Layout(),
        Layout(options={"save_distributed_checkpoint": False}),
    ],
    ids=["stages", "folder", "file"],
)
def test_a_resume_keeps_their_options(layout: Layout, tmp_path: Path) -> None:
    [wanted] = run_ranks(straight, 1)
    seen = set()
    for found in run_ranks(go_on, layout.world, layout, str(tmp_path)):
        assert found["rates"] == pytest.approx(wanted["rates"], rel=1e-12)
        for name, value in found["params"].items():
            assert torch.allclose(value, wanted["params"][name], rtol=1e-10, atol=1e-12), name
            seen.add(name)
    assert seen == set(wanted["params"])
