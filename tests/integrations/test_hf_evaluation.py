"""Evaluation and prediction of Hugging Face's Trainer on packs give what its own give on padded rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from lightning_thd.integrations import packed_trainer
from tests.loss.test_router_balance import expert_model
from tests.ranks import run_ranks
from tests.tiny import nll, sequences, tiny_llama

SAMPLES = sequences(23, labels=True, seed=4)
OTHER = sequences(9, labels=True, seed=6)
CAPACITY = 48


def accuracy(found: Any) -> dict[str, float]:
    predictions, labels = found.predictions[:, :-1], found.label_ids[:, 1:]
    return {"accuracy": float((predictions == labels)[labels != -100].mean()), "rows": float(len(labels))}


def arguments(out: str, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=out, use_cpu=True, report_to=[], disable_tqdm=True, per_device_eval_batch_size=4, **options
    )


def best_token(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    assert logits.shape[:2] == labels.shape
    return logits.argmax(-1)


def padded(samples: list[Any]) -> dict[str, torch.Tensor]:
    """Pad rows for transformers' own Trainer, sdpa and all."""
    longest = max(len(s["input_ids"]) for s in samples)
    batch: dict[str, Any] = {"input_ids": [], "labels": [], "attention_mask": []}
    for s in samples:
        n, ids = longest - len(s["input_ids"]), list(s["input_ids"])
        batch["input_ids"].append(ids + [0] * n)
        batch["labels"].append([-100, *list(s["labels"])[1:]] + [-100] * n)
        batch["attention_mask"].append([1] * len(ids) + [0] * n)
    return {name: torch.tensor(rows) for name, rows in batch.items()}


def evaluate(out: str) -> dict[str, Any]:
    trainer = packed_trainer()(
        model=tiny_llama(),
        args=arguments(out, include_for_metrics=["inputs"]),
        eval_dataset={"first": SAMPLES, "other": OTHER},
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=best_token,
        capacity=CAPACITY,
    )
    return {"metrics": trainer.evaluate(), "predicted": trainer.predict(SAMPLES)}


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_metrics_equal_those_of_padded_rows(world: int, tmp_path: Path) -> None:
    model: Any = tiny_llama()
    model.set_attn_implementation("sdpa")
    theirs = Trainer(
        model=model,
        args=arguments(str(tmp_path), remove_unused_columns=False),
        data_collator=padded,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=best_token,
    )
    wanted = theirs.predict(SAMPLES)
    for found in run_ranks(evaluate, world, str(tmp_path)):
        metrics, predicted = found["metrics"], found["predicted"]
        assert metrics["eval_first_accuracy"] == pytest.approx(wanted.metrics["test_accuracy"], rel=1e-12)
        assert metrics["eval_first_rows"] == len(SAMPLES)
        assert metrics["eval_other_rows"] == len(OTHER)
        np.testing.assert_array_equal(predicted.label_ids, wanted.label_ids)
        kept = wanted.label_ids != -100
        np.testing.assert_array_equal(predicted.predictions[kept], wanted.predictions[kept])
        for name, samples in (("first", SAMPLES), ("other", OTHER)):
            with torch.no_grad():
                results = [nll(tiny_llama(), sample) for sample in samples]
            loss = sum(total for total, _ in results) / sum(count for _, count in results)
            assert metrics[f"eval_{name}_loss"] == pytest.approx(float(loss), rel=1e-12)
        runtime = metrics["eval_first_runtime"]
        assert metrics["eval_first_samples_per_second"] == pytest.approx(len(SAMPLES) / runtime, rel=0.05)
        assert metrics["eval_first_steps_per_second"] < metrics["eval_first_samples_per_second"]


def test_logits_come_back_a_row_a_sequence(tmp_path: Path) -> None:
    trainer = packed_trainer()(model=tiny_llama(), args=arguments(str(tmp_path)), capacity=CAPACITY)
    found = trainer.predict(SAMPLES)
    assert found.predictions.shape[0] == len(SAMPLES)
    for row, sample in zip(found.predictions, SAMPLES, strict=True):
        ids = torch.as_tensor(sample["input_ids"])
        with torch.no_grad():
            wanted = tiny_llama()(input_ids=ids[None]).logits[0]
        np.testing.assert_allclose(row[: len(ids)], wanted.numpy(), rtol=1e-9, atol=1e-9)
        assert (row[len(ids) :] == -100).all()


def top_tokens(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One row of sums a sequence, as long as its longest sequence is, and one token a slot."""
    return logits.masked_fill(labels[..., None] == -100, 0).sum(1)[:, :CAPACITY], logits.argmax(-1)


def test_a_row_a_sequence_that_is_as_long_as_the_longest_stays_whole(tmp_path: Path) -> None:
    samples = [
        {"input_ids": [5] * CAPACITY, "labels": [5] * CAPACITY},
        {"input_ids": [3, 4], "labels": [3, 4]},
    ]
    trainer = packed_trainer()(
        model=tiny_llama(),
        args=arguments(str(tmp_path)),
        preprocess_logits_for_metrics=top_tokens,
        capacity=2 * CAPACITY,
    )
    rows, tokens = trainer.predict(samples).predictions
    assert rows.shape == tokens.shape == (2, CAPACITY)
    assert (rows != -100).all()
    assert (tokens[1, 2:] == -100).all()


def train(out: str) -> dict[str, Any]:
    trainer = packed_trainer()(
        model=tiny_llama(),
        args=arguments(
            out,
            max_steps=4,
            eval_strategy="steps",
            eval_steps=1,
            save_steps=1,
            logging_steps=1,
            load_best_model_at_end=True,
            metric_for_best_model="accuracy",
            include_num_input_tokens_seen="non_padding",
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
        ),
        train_dataset=sequences(60, labels=True),
        eval_dataset=SAMPLES,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=best_token,
        capacity=CAPACITY,
    )
    batches: list[Any] = []
    kept = trainer.compute_loss
    trainer.compute_loss = lambda model, inputs, *a, **k: (
        batches.append(inputs["batch"]) or kept(model, inputs, *a, **k)
    )
    result = trainer.train()
    return {
        "best": trainer.state.best_metric,
        "history": [row["eval_accuracy"] for row in trainer.state.log_history if "eval_accuracy" in row],
        "seen": trainer.state.num_input_tokens_seen,
        "tokens": sum(batch.stats.real_tokens for batch in batches),
        "rate": result.metrics["train_samples_per_second"] * result.metrics["train_runtime"],
        "sequences": sum(len(batch.lengths) for batch in batches),
    }


def test_the_best_model_is_found_by_a_metric_and_totals_are_of_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(train, 2, str(tmp_path))
    assert first["best"] == max(first["history"])
    assert len(first["history"]) == 4
    assert first["seen"] == first["tokens"] + second["tokens"]
    assert first["rate"] == pytest.approx(first["sequences"] + second["sequences"], rel=0.01)


class Watching(TrainerCallback):
    """Counts the packs it is told of and keeps the loader it is shown."""

    packs = 0
    shown: Any = None

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        self.packs += 1

    def on_evaluate(self, *args: Any, eval_dataloader: Any = None, **kwargs: Any) -> None:
        self.shown = eval_dataloader


class TwoWeights(torch.optim.SGD):
    """Has weights of its own for evaluation, as schedule-free optimizers do: here, moved by one."""

    moved = 0.0

    def eval(self) -> None:
        self._move(1.0)

    def train(self) -> None:
        self._move(0.0)

    @torch.no_grad()
    def _move(self, to: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(to - self.moved)
        self.moved = to


def test_callbacks_and_optimizers_are_told_of_an_evaluation(tmp_path: Path) -> None:
    model = tiny_llama()
    optimizer, watching = TwoWeights(model.parameters(), lr=0.0), Watching()
    trainer = packed_trainer()(
        model=model,
        args=arguments(str(tmp_path), max_steps=1),
        train_dataset=SAMPLES,
        eval_dataset=SAMPLES,
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)),
        callbacks=[watching],
        capacity=CAPACITY,
        peak=1e9,
    )
    trainer.train()
    assert optimizer.moved == 0.0
    loss = trainer.evaluate()["eval_loss"]
    assert optimizer.moved == 1.0
    with torch.no_grad():
        results = [nll(trainer.model, sample) for sample in SAMPLES]
    assert loss == pytest.approx(float(sum(t for t, _ in results) / sum(n for _, n in results)), rel=1e-12)
    assert watching.packs == len(watching.shown) > 1


def test_rates_of_steps_are_those_of_packs_whatever_they_are_called(tmp_path: Path) -> None:
    trainer = packed_trainer()(model=tiny_llama(), args=arguments(str(tmp_path)), capacity=CAPACITY)
    packs = len(trainer.get_eval_dataloader(SAMPLES))
    for name, metrics in (
        ("train", trainer.evaluate(SAMPLES, metric_key_prefix="train")),
        ("test", trainer.predict(SAMPLES).metrics),
    ):
        steps = metrics[f"{name}_steps_per_second"] / metrics[f"{name}_samples_per_second"] * len(SAMPLES)
        assert steps == pytest.approx(packs, rel=0.01)


def test_a_set_without_loss_tokens_has_no_loss(tmp_path: Path) -> None:
    trainer = packed_trainer()(model=tiny_llama(), args=arguments(str(tmp_path)), capacity=CAPACITY)
    found = trainer.evaluate([{"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}])
    assert np.isnan(found["eval_loss"])
    assert found["eval_loss_tokens"] == 0


def test_an_evaluation_set_is_read_as_data_kwargs_say(tmp_path: Path) -> None:
    rows = [*SAMPLES, {"input_ids": [], "labels": []}]
    given = {"model": tiny_llama(), "args": arguments(str(tmp_path)), "capacity": CAPACITY}
    with pytest.raises(ValueError, match="empty='drop'"):
        packed_trainer()(**given).evaluate(rows)
    dropped = packed_trainer()(**given, data_kwargs={"empty": "drop"}).evaluate(rows)
    assert dropped["eval_loss"] == packed_trainer()(**given).evaluate(SAMPLES)["eval_loss"]


def test_an_evaluation_has_the_balance_of_experts_as_training_has(tmp_path: Path) -> None:
    """Two packs of two batches of rows, so that both balance the same slots."""
    rows = [np.random.default_rng(i).integers(0, 60, CAPACITY).tolist() for i in range(2)]
    samples = [{"input_ids": row, "labels": row} for row in rows]
    model = expert_model("mixtral")
    model.config.output_router_logits, model.router_aux_loss_coef = True, 0.5
    trainer = packed_trainer()(model=model, args=arguments(str(tmp_path)), capacity=CAPACITY)
    found = trainer.evaluate(samples)["eval_loss"]
    model.set_attn_implementation("sdpa")
    args = arguments(str(tmp_path), remove_unused_columns=False)
    args.per_device_eval_batch_size = 1
    theirs = Trainer(model=model, args=args, data_collator=padded)
    assert found == pytest.approx(theirs.evaluate(samples)["eval_loss"], rel=1e-6)
