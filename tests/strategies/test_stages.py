"""Validation, prediction and manual optimisation on ranks that share packs give what one process gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_thd import Packs, Sequences, THDBatch, THDDataModule, causal_lm_loss
from lightning_thd.packing import PackPlanner
from tests.ranks import run_ranks
from tests.strategies.jobs import (
    CAPACITY,
    Job,
    Layout,
    data,
    family_model,
    full_parameters,
    make_optimizer,
    make_trainer,
    train_by_hand,
)
from tests.tiny import largest_error, nll, sequences

SAMPLES = sequences(14, labels=True, seed=5)


def look(layout: Layout) -> tuple[float, dict[int, Tensor]]:
    """Validate and predict; return the logged loss and the logits of this rank's sequences."""
    trainer = make_trainer(layout, "qwen3")
    module = Job()
    given = THDDataModule(capacity=CAPACITY, val=SAMPLES, predict=SAMPLES)
    (logged,) = trainer.validate(module, given, verbose=False)
    predictions = trainer.predict(module, given)
    return logged["val/loss"], {i: logits for batch in predictions for i, logits in batch}


@pytest.mark.parametrize(
    "layout",
    [Layout(strategy="thd_ddp", dp=2, cp=2), Layout(cp=2, tp=2, options={"sequence_parallel": True})],
    ids=["dp2cp2", "cp2tp2"],
)
def test_validation_and_prediction(layout: Layout) -> None:
    model = Job().model
    with torch.no_grad():
        results = [nll(model, sample) for sample in SAMPLES]
        logits = [model(input_ids=torch.as_tensor(s["input_ids"])[None]).logits[0] for s in SAMPLES]
    total = float(sum(loss for loss, _ in results)) / sum(count for _, count in results)
    found: dict[int, Tensor] = {}
    for logged, of_rank in run_ranks(look, layout.world, layout):
        assert logged == pytest.approx(total, rel=1e-6)  # Lightning keeps logs in fp32
        found |= of_rank
    assert sorted(found) == list(range(len(SAMPLES)))
    for i, wanted in enumerate(logits):
        torch.testing.assert_close(found[i], wanted, rtol=1e-9, atol=1e-9)


class Keeps(Job):
    """Holds on to its last batch, a shard, as a callback of a user's may."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kept = batch


def train_and_go_on(layout: Layout) -> tuple[float, float]:
    """Train on shards, then run a model on a sequence of as many tokens as a shard has slots."""
    module = Keeps()
    make_trainer(layout).fit(module, data(Packs(1)))
    ids = torch.arange(module.kept.input_ids.shape[0])[None] % 60
    with torch.no_grad():
        found, wanted = (model(input_ids=ids).logits for model in (Job().model, stock_model()))
    return float((found - wanted).abs().max()), float(wanted.abs().max())


def stock_model() -> Any:
    model = family_model("qwen3")
    model.set_attn_implementation("sdpa")
    return model


def test_a_shard_that_is_kept_refuses_nothing_once_its_job_has_ended() -> None:
    for error, scale in run_ranks(train_and_go_on, 2, Layout(cp=2)):
        assert error < 1e-12 * scale


class Manual(Job):
    """A module under manual optimisation, one pack a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: THDBatch, batch_idx: int) -> dict[str, Tensor]:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = causal_lm_loss(self.model, batch)
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss.detach()}


def by_itself(layout: Layout) -> dict[str, Tensor]:
    module = Manual()
    trainer = make_trainer(layout, gradient_clip_val=None, max_steps=4)
    trainer.fit(module, data(Packs(layout.dp)))
    return full_parameters(module.model)


@pytest.mark.parametrize(
    "layout", [Layout(strategy="thd_ddp", cp=2), Layout(dp=2, tp=2)], ids=["ddp", "model parallel"]
)
def test_manual_optimisation(layout: Layout) -> None:
    samples = sequences(80, labels=True)
    lengths = [len(sample["input_ids"]) for sample in samples]
    planner = PackPlanner(lengths, CAPACITY, global_batch=Packs(layout.dp), align=layout.align)
    model = Job().model
    optimizer = make_optimizer(model)
    for k in range(4):
        ids = [
            int(i) for rank in planner.step(0, k, layout.dp).indices_by_rank() for pack in rank for i in pack
        ]
        results = [nll(model, samples[i]) for i in ids]
        optimizer.zero_grad()
        (sum(loss for loss, _ in results) / sum(count for _, count in results)).backward()
        optimizer.step()
    for found in run_ranks(by_itself, layout.world, layout):
        assert largest_error(found, full_parameters(model)) < 1e-10


def validated_first(layout: Layout) -> dict[str, Tensor]:
    module = Job()
    make_trainer(layout).validate(module, THDDataModule(capacity=CAPACITY, val=SAMPLES), verbose=False)
    make_trainer(layout).fit(module, data(Sequences(12)))
    return full_parameters(module.model)


def test_training_after_an_evaluation_trains_every_weight() -> None:
    wanted = train_by_hand("qwen3", Layout(cp=2), Sequences(12))
    for found in run_ranks(validated_first, 2, Layout(cp=2)):
        assert largest_error(found, wanted["params"]) < 1e-10
