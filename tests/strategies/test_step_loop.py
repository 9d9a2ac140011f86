"""Steps under Lightning equal a hand-written loop over sequences that were never packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import lr_finder

from lightning_thd import Packs, Sequences, THDBatch, THDDataModule
from lightning_thd.packing import PackPlanner
from tests.ranks import run_ranks
from tests.strategies.jobs import Job, Layout, data, family_model
from tests.strategies.jobs import make_trainer as trainer_of
from tests.tiny import TinyModule, largest_error, quiet_trainer, sequences, train_by_hand

CAPACITY = 48
STEPS = 3


def make_trainer(strategy: str, **kwargs: Any) -> L.Trainer:
    defaults = {"max_steps": STEPS, "log_every_n_steps": 1, "gradient_clip_val": 0.5}
    return quiet_trainer(strategy=strategy, **{**defaults, **kwargs})


def fit(strategy: str, step: Packs | Sequences | None, **kwargs: Any) -> dict[str, Any]:
    samples = sequences(60, labels=True)
    module = TinyModule()
    trainer = make_trainer(strategy, **kwargs)
    trainer.fit(module, THDDataModule(samples, capacity=CAPACITY, global_batch=step))
    return {
        "params": {name: p.detach() for name, p in module.model.named_parameters()},
        "outputs": module.outputs,
        "seen": module.seen,
        "zero_grads": module.zero_grads,
        "clips": module.clips,
        "steps": trainer.global_step,
        "logged": float(trainer.callback_metrics["train/loss_step"]),
    }


def by_hand(step: Packs | Sequences, dp: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    samples = sequences(60, labels=True)
    planner = PackPlanner([len(s["input_ids"]) for s in samples], CAPACITY, global_batch=step)
    return train_by_hand(samples, planner, STEPS, dp=dp)


def test_sequences_on_one_device_equal_the_hand_loop() -> None:
    trained = fit("thd", Sequences(12))
    params, losses = by_hand(Sequences(12), 1)
    assert largest_error(trained["params"], params) < 1e-12
    assert trained["outputs"] == pytest.approx(losses, rel=1e-12)
    assert trained["logged"] == pytest.approx(losses[-1], rel=1e-6)  # Lightning keeps logs in fp32
    assert trained["steps"] == trained["zero_grads"] == trained["clips"] == STEPS
    assert len(trained["seen"]) > STEPS  # several microbatches a step, or nothing was tested


def test_packs_with_accumulation_equal_the_hand_loop_under_plain_lightning() -> None:
    trained = fit("auto", Packs(3), accumulate_grad_batches=3)
    params, losses = by_hand(Packs(3), 1)
    assert largest_error(trained["params"], params) < 1e-12
    # Lightning gives callbacks loss / accumulate_grad_batches; a step's add up to its exact mean.
    sums = [sum(trained["outputs"][k : k + 3]) for k in range(0, 3 * STEPS, 3)]
    assert sums == pytest.approx(losses, rel=1e-12)


class Labels(TinyModule):
    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        self.log("train/label", batch.extras["labels"].double().mean(), on_step=False, on_epoch=True)
        return next(self.parameters()).sum() * 0.0


@pytest.mark.parametrize(("strategy", "step"), [("auto", Packs(1)), ("thd", Packs(1)), ("thd", Sequences(7))])
def test_epoch_means_of_labels_are_those_of_the_sequences(strategy: str, step: Packs | Sequences) -> None:
    samples = [{**sample, "label": i} for i, sample in enumerate(sequences(28))]
    trainer = make_trainer(strategy, max_steps=-1, max_epochs=1)
    data = THDDataModule(samples, capacity=CAPACITY, global_batch=step, needs_boundaries=False)
    trainer.fit(Labels(), data)
    assert float(trainer.callback_metrics["train/label"]) == pytest.approx(13.5)


def test_sequences_on_several_ranks_equal_the_hand_loop() -> None:
    ranks = run_ranks(fit_rank, 2, "thd_ddp", Sequences(16))
    params, losses = by_hand(Sequences(16), 2)
    for rank in ranks:
        assert largest_error(rank["params"], params) < 1e-12
        assert rank["steps"] == rank["zero_grads"] == STEPS
        assert rank["logged"] == pytest.approx(losses[-1], rel=1e-6)
    means = [sum(values) / 2 for values in zip(*(rank["outputs"] for rank in ranks), strict=True)]
    assert means == pytest.approx(losses, rel=1e-12)
    assert len({len(rank["seen"]) for rank in ranks}) == 1


def test_packs_on_two_ranks_equal_the_hand_loop_under_plain_ddp() -> None:
    ranks = run_ranks(fit_rank, 2, "ddp", Packs(4), 2)
    params, _ = by_hand(Packs(4), 2)
    for rank in ranks:
        assert largest_error(rank["params"], params) < 1e-12


def fit_rank(strategy: str, step: Packs | Sequences, accumulate: int = 1) -> dict[str, Any]:
    world = torch.distributed.get_world_size()
    return fit(strategy, step, devices=world, accumulate_grad_batches=accumulate)


class Searching(LearningRateFinder):
    """Searches when the first epoch begins, as the example of Lightning's documentation does."""

    def on_fit_start(self, *args: Any) -> None:
        return

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.lr_find(trainer, pl_module)


class HandsOver(L.Callback):
    """Lets a finder search that the Trainer does not know of."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        LearningRateFinder(**SEARCH).lr_find(trainer, pl_module)


SEARCH: dict[str, Any] = {"num_training_steps": 3, "min_lr": 1e-5, "update_attr": False}


def searched_losses(folder: str, callback: type[L.Callback]) -> list[float]:
    """Return the losses that this rank's search of a learning rate sees."""
    # Whatever Lightning calls the callback of a search and its module.
    lr_finder._LRCallback.__module__ = "lightning.pytorch.tuner.search"
    options = SEARCH if issubclass(callback, LearningRateFinder) else {}
    module = TinyModule()
    trainer = quiet_trainer(
        strategy="thd_ddp", devices=2, max_steps=1, callbacks=[callback(**options)], default_root_dir=folder
    )
    trainer.fit(module, THDDataModule(sequences(80), capacity=CAPACITY, global_batch=Sequences(16)))
    return module.outputs[: SEARCH["num_training_steps"]]


@pytest.mark.parametrize("callback", [LearningRateFinder, Searching, HandsOver])
def test_a_search_of_a_learning_rate_sees_one_loss_on_all_ranks(
    tmp_path: Path, callback: type[L.Callback]
) -> None:
    first, second = run_ranks(searched_losses, 2, str(tmp_path), callback)
    assert len(first) == SEARCH["num_training_steps"]
    assert first == second


class LogsEverything(TinyModule):
    def training_step(self, batch: THDBatch, batch_idx: int) -> dict[str, torch.Tensor]:
        self.log("rows", float(len(batch.input_ids)), on_step=True, on_epoch=False, reduce_fx="sum")
        self.log("longest", float(batch.max_seqlen), on_step=True, on_epoch=False, reduce_fx="max")
        return {"loss": super().training_step(batch, batch_idx), "extra": torch.ones(1)}


def test_logs_are_reduced_over_the_microbatches_of_a_step() -> None:
    samples = sequences(60)
    module = LogsEverything()
    trainer = make_trainer("thd", max_steps=1)
    with pytest.warns(UserWarning, match=r"returns \['extra'\] beside the loss.* of only one microbatch"):
        trainer.fit(module, THDDataModule(samples, capacity=CAPACITY, global_batch=Sequences(20)))
    lengths = [len(samples[i]["input_ids"]) for ids in module.seen for i in ids]
    assert len(module.seen) > 1
    assert float(trainer.callback_metrics["rows"]) == sum(lengths)
    assert float(trainer.callback_metrics["longest"]) == max(lengths)


class LogsAfter(TinyModule):
    """Logs the loss of a step when it is over, which weighs as much as the step."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("after", outputs["loss"].detach() * self.trainer.accumulate_grad_batches, on_epoch=True)


@pytest.mark.parametrize(
    ("step", "accumulate"), [(Sequences(20), 1), (Packs(2), 2)], ids=["sequences", "packs"]
)
def test_epoch_mean_is_the_mean_over_all_tokens(step: Packs | Sequences, accumulate: int) -> None:
    module = LogsAfter(lr=0.0)
    trainer = make_trainer("thd", max_epochs=1, max_steps=-1, accumulate_grad_batches=accumulate)
    trainer.fit(module, THDDataModule(sequences(60), capacity=CAPACITY, global_batch=step))
    samples = [sequences(60)[i] for ids in module.seen for i in ids]  # Packs(2) leaves an odd pack out
    assert len(samples) > 50
    whole = PackPlanner([len(s["input_ids"]) for s in samples], 10_000, global_batch=Sequences(len(samples)))
    _, losses = train_by_hand(samples, whole, 1)
    for name in ("train/loss_epoch", "after_epoch"):  # Lightning keeps sums in fp32
        assert float(trainer.callback_metrics[name]) == pytest.approx(losses[0], rel=1e-6)


class LogsOne(L.LightningModule):
    """Logs 1, in training and in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        self.log("train", torch.ones(()), on_step=True, on_epoch=True)
        return self.weight.sum()

    def validation_step(self, batch: THDBatch, batch_idx: int) -> None:
        self.log("val", torch.ones(()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])
@pytest.mark.parametrize("strategy", ["auto", "thd"])
def test_epoch_means_count_more_tokens_than_half_precision_can(strategy: str, precision: Any) -> None:
    samples = [{"input_ids": torch.ones(3_000, dtype=torch.int64)}] * 30  # fp16 ends at 65,504
    trainer = quiet_trainer(strategy=strategy, precision=precision, max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(LogsOne(), THDDataModule(samples, val=samples, capacity=3_000))
    for name in ("train_epoch", "val"):
        assert float(trainer.callback_metrics[name]) == pytest.approx(1.0, rel=1e-6)


class Keeps(Job):
    """Holds on to its last batch, a shard, as a callback of a user's may."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kept = batch


def train_and_go_on(layout: Layout) -> tuple[float, float]:
    """Train on shards, then run a model on a sequence of as many tokens as a shard has slots."""
    module = Keeps()
    trainer_of(layout, max_steps=1).fit(module, data(Packs(1)))
    ids = torch.arange(module.kept.input_ids.shape[0])[None] % 60
    with torch.no_grad():
        actual, expected = (model(input_ids=ids).logits for model in (Job().model, stock_model()))
    return float((actual - expected).abs().max()), float(expected.abs().max())


def stock_model() -> Any:
    model = family_model("qwen3")
    model.set_attn_implementation("sdpa")
    return model


def test_a_shard_that_is_kept_refuses_nothing_once_its_job_has_ended() -> None:
    for error, scale in run_ranks(train_and_go_on, 2, Layout(cp=2)):
        assert error < 1e-12 * scale
