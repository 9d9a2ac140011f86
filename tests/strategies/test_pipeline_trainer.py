"""What else a Trainer does, on stages: tests, callbacks, schedulers, resumes, dropout."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor

from lightning_thd import Sequences, THDBatch, causal_lm_loss
from tests.ranks import run_ranks
from tests.strategies.jobs import (
    INTERLEAVED,
    Job,
    Layout,
    data,
    full_parameters,
    make_optimizer,
    make_trainer,
)
from tests.tiny import sequences
from tests.wide import nothing_narrower


class Scheduled(Job):
    """A scheduler by step and one by epoch, a test, and a validation loss that gets worse."""

    def __init__(self) -> None:
        super().__init__("qwen3@4t")
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.model)
        steps = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, total_iters=8)
        epochs = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [
            {"scheduler": steps, "interval": "step"},
            {"scheduler": epochs, "interval": "epoch"},
        ]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def test_step(self, batch: THDBatch, batch_idx: int) -> None:
        self.log("test/loss", causal_lm_loss(self.model, batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("worse", float(self.current_epoch))


def run_wide(layout: Layout, folder: str) -> dict[str, Any]:
    with nothing_narrower():
        return run_all(layout, folder)


def run_all(layout: Layout, folder: str) -> dict[str, Any]:
    """Fit with early stopping, test, then resume from the middle of an epoch."""
    warnings.filterwarnings("ignore")
    module = Scheduled()
    stop = EarlyStopping("worse", mode="min", patience=2)
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=5, save_top_k=-1, save_last=True)
    options: dict[str, Any] = {"max_steps": -1, "max_epochs": 9, "enable_checkpointing": True}
    datamodule = data(Sequences(20), val=sequences(12, seed=3), test=sequences(9, seed=5))
    trainer = make_trainer(layout, callbacks=[stop, saver], **options)
    trainer.fit(module, datamodule)
    tested = trainer.test(module, datamodule, verbose=False)[0]
    names = sorted(path.name for path in Path(folder).iterdir())
    found = {"losses": module.losses, "rates": module.rates, "stopped": stop.stopped_epoch, "test": tested}
    again = Scheduled()
    trainer = make_trainer(layout, max_steps=8, max_epochs=9)
    trainer.fit(again, data(Sequences(20), val=sequences(12, seed=3)), ckpt_path=f"{folder}/step=5.ckpt")
    return {**found, "again": again.losses, "rates again": again.rates, "names": names}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, INTERLEAVED, {"asynchronous_checkpoints": True}])
def test_callbacks_schedulers_and_a_resume_inside_an_epoch(tmp_path: Path, options: dict[str, Any]) -> None:
    (wanted,) = run_ranks(run_wide, 1, Layout(), str(tmp_path / "one"))
    assert wanted["stopped"] == 2
    assert wanted["again"] == pytest.approx(wanted["losses"][5:8], rel=1e-10)
    for rank in run_ranks(run_wide, 2, Layout(pp=2, options=options), str(tmp_path / "two"), timeout_s=400.0):
        assert rank["names"] == wanted["names"]
        assert rank["stopped"] == 2
        for name in ("losses", "again", "rates", "rates again"):
            assert rank[name] == pytest.approx(wanted[name], rel=1e-10), name
        assert rank["test"] == pytest.approx(wanted["test"], rel=1e-6)  # Lightning keeps fp32


class Dropping(Job):
    """Drops what its layers give, and draws a number in ``training_step`` that all stages must agree on."""

    def __init__(self, recompute: bool) -> None:
        super().__init__("gpt2")
        config = transformers.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=512, resid_pdrop=0.5, attn_pdrop=0.0
        )
        self.model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="thd")
        self.model = self.model.double().train()
        if recompute:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.drawn: list[float] = []
        self.masks: list[Tensor] = []

    def configure_model(self) -> None:
        for layer in self.model.transformer.h:
            layer.mlp.dropout.register_forward_hook(lambda m, args, out: self.masks.append(out.eq(0)))

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        self.drawn.append(float(torch.rand(())))
        return super().training_step(batch, batch_idx)


def drop(layout: Layout, recompute: bool, seed: int) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    torch.manual_seed(7)
    module = Dropping(recompute)
    torch.manual_seed(seed)
    make_trainer(layout, max_steps=3).fit(module, data(Sequences(12)))
    first = module.masks[0]
    return {
        "losses": module.losses,
        "params": full_parameters(module.model),
        "drawn": module.drawn,
        "mask": first,
    }


def drop_all(layout: Layout) -> list[dict[str, Any]]:
    return [drop(layout, *how) for how in ((False, 1), (False, 1), (True, 1), (False, 2))]


@pytest.mark.slow
def test_dropout_is_the_stages_own_and_reproducible() -> None:
    for layout in (Layout(pp=2), Layout(pp=2, options=INTERLEAVED)):
        first, last = run_ranks(drop_all, 2, layout)
        assert not torch.equal(first[0]["mask"], last[0]["mask"])  # both were seeded alike
        for rank in (first, last):
            plain, again, recomputed, other = rank
            assert plain["losses"] == again["losses"] != other["losses"]
            assert recomputed["losses"] == pytest.approx(plain["losses"], rel=1e-10)
            for name, value in plain["params"].items():
                assert torch.equal(value, again["params"][name])
                torch.testing.assert_close(value, recomputed["params"][name], rtol=1e-9, atol=1e-10)
        assert len(set(first[0]["drawn"])) == len(first[0]["drawn"]) > 3
        assert sorted(first[0]["drawn"]) == sorted(last[0]["drawn"])
