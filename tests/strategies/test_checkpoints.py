"""A checkpoint of one layout goes on in another, as one process would, and leaves as plain weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_thd import Sequences
from lightning_thd.strategies import THDModelParallelStrategy
from tests.ranks import run_ranks
from tests.strategies.jobs import CLIP, Job, Layout, data, family_model, full_parameters
from tests.tiny import largest_error

STEPS, SAVED = 6, 3


def run(layout: Layout, folder: str, resume: bool, distributed: bool) -> dict[str, Any]:
    """Train to the end, saving in the middle; or go on from what was saved."""
    warnings.filterwarnings("ignore")
    at = Layout(
        dp=layout.dp,
        cp=layout.cp,
        tp=layout.tp,
        options={**layout.options, "save_distributed_checkpoint": distributed},
    )
    module = Job("qwen3")
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    trainer = L.Trainer(
        strategy=at.make(),
        max_steps=STEPS,
        accelerator="cpu",
        devices=layout.world,
        logger=False,
        gradient_clip_val=CLIP,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saver] if not resume else [],
        enable_checkpointing=not resume,
    )
    trainer.fit(module, data(Sequences(12)), ckpt_path=f"{folder}/step={SAVED}.ckpt" if resume else None)
    losses = torch.tensor(module.losses, dtype=torch.float64)
    dist.all_reduce(losses)
    if not resume:
        trainer.strategy.save_pretrained(f"{folder}/exported")
    return {
        "losses": (losses / dist.get_world_size()).tolist(),
        "params": full_parameters(module.model),
    }


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [True, False], ids=["folder", "file"])
def test_go_on_in_another_layout(tmp_path: Path, distributed: bool) -> None:
    folder = str(tmp_path)
    whole = run_ranks(run, 4, Layout(dp=2, cp=2), folder, False, distributed)[0]
    assert len(whole["losses"]) == STEPS
    assert (tmp_path / f"step={SAVED}.ckpt").is_dir() == distributed
    for layout in (Layout(dp=2, tp=2), Layout()):
        rest = run_ranks(run, layout.world, layout, folder, True, distributed)[0]
        assert rest["losses"] == pytest.approx(whole["losses"][SAVED:], rel=1e-10)
        assert largest_error(rest["params"], whole["params"]) < 1e-10
    if distributed:
        dcp_to_torch_save(tmp_path / f"step={STEPS}.ckpt", tmp_path / "plain.pt")
        plain = torch.load(tmp_path / "plain.pt")["state_dict"]
        found = {name.removeprefix("model."): value for name, value in plain.items()}
        assert largest_error(found, whole["params"]) == 0.0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float64)
    assert largest_error(full_parameters(model), whole["params"]) == 0.0


def test_what_to_export_must_be_clear(tmp_path: Path) -> None:
    strategy, module = THDModelParallelStrategy(), L.LightningModule()
    module.first, module.second = family_model("qwen3"), family_model("qwen3")
    strategy._lightning_module = module
    with pytest.raises(ValueError, match=r"holds 2 models with save_pretrained\(\), wanted one. Pass model="):
        strategy.save_pretrained(tmp_path)
