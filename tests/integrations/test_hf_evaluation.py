"""Evaluation and prediction of Hugging Face's Trainer on packs give what its own give on padded rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainingArguments

from lightning_thd.integrations import packed_trainer
from tests.integrations.support import mean_nll
from tests.ranks import run_ranks
from tests.tiny import sequences, tiny_llama

SAMPLES = sequences(23, labels=True, seed=4)
OTHER = sequences(9, labels=True, seed=6)
CAPACITY = 48


def accuracy(found: Any) -> dict[str, float]:
    predictions = found.predictions[:, :-1]
    labels = found.label_ids[:, 1:]
    return {"accuracy": float((predictions == labels)[labels != -100].mean()), "rows": float(len(labels))}


def arguments(out: Path | str, **options: Any) -> TrainingArguments:
    settings = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "per_device_eval_batch_size": 4}
    return TrainingArguments(output_dir=str(out), **settings, **options)


def best_token(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    assert logits.shape[:2] == labels.shape
    return logits.argmax(-1)


def padded(samples: list[Any]) -> dict[str, torch.Tensor]:
    """Pad rows for transformers' own Trainer, sdpa and all."""
    longest = max(len(s["input_ids"]) for s in samples)
    batch: dict[str, Any] = {"input_ids": [], "labels": [], "attention_mask": []}
    for s in samples:
        n = longest - len(s["input_ids"])
        ids = list(s["input_ids"])
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
        args=arguments(tmp_path, remove_unused_columns=False),
        data_collator=padded,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=best_token,
    )
    expected = theirs.predict(SAMPLES)

    for of_rank in run_ranks(evaluate, world, str(tmp_path)):
        metrics = of_rank["metrics"]
        predicted = of_rank["predicted"]
        assert metrics["eval_first_accuracy"] == pytest.approx(expected.metrics["test_accuracy"], rel=1e-12)
        assert metrics["eval_first_rows"] == len(SAMPLES)
        assert metrics["eval_other_rows"] == len(OTHER)
        np.testing.assert_array_equal(predicted.label_ids, expected.label_ids)
        kept = expected.label_ids != -100
        np.testing.assert_array_equal(predicted.predictions[kept], expected.predictions[kept])
        for name, samples in (("first", SAMPLES), ("other", OTHER)):
            assert metrics[f"eval_{name}_loss"] == pytest.approx(mean_nll(samples)[0], rel=1e-12)
        runtime = metrics["eval_first_runtime"]
        assert metrics["eval_first_samples_per_second"] == pytest.approx(len(SAMPLES) / runtime, rel=0.05)
        assert metrics["eval_first_steps_per_second"] < metrics["eval_first_samples_per_second"]


def test_logits_come_back_a_row_a_sequence(tmp_path: Path) -> None:
    trainer = packed_trainer()(model=tiny_llama(), args=arguments(tmp_path), capacity=CAPACITY)
    output = trainer.predict(SAMPLES)
    assert output.predictions.shape[0] == len(SAMPLES)
    for row, sample in zip(output.predictions, SAMPLES, strict=True):
        ids = torch.as_tensor(sample["input_ids"])
        with torch.no_grad():
            expected = tiny_llama()(input_ids=ids[None]).logits[0]
        np.testing.assert_allclose(row[: len(ids)], expected.numpy(), rtol=1e-9, atol=1e-9)
        assert (row[len(ids) :] == -100).all()
    packs = len(trainer.get_eval_dataloader(SAMPLES))
    metrics = output.metrics
    rate = metrics["test_steps_per_second"] / metrics["test_samples_per_second"]
    assert rate * len(SAMPLES) == pytest.approx(packs, rel=0.01)


def top_tokens(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One row of sums a sequence, as long as its longest sequence is, and one token a slot."""
    return logits.masked_fill(labels[..., None] == -100, 0).sum(1)[:, :CAPACITY], logits.argmax(-1)


def test_a_row_a_sequence_that_is_as_long_as_the_longest_stays_whole(tmp_path: Path) -> None:
    samples = [{"input_ids": ids, "labels": ids} for ids in ([5] * CAPACITY, [3, 4])]
    options: dict[str, Any] = {"preprocess_logits_for_metrics": top_tokens, "capacity": 2 * CAPACITY}
    trainer = packed_trainer()(model=tiny_llama(), args=arguments(tmp_path), **options)
    rows, tokens = trainer.predict(samples).predictions
    assert rows.shape == tokens.shape == (2, CAPACITY)
    assert (rows != -100).all()
    assert (tokens[1, 2:] == -100).all()


def train(out: str) -> dict[str, Any]:
    options: dict[str, Any] = {"max_steps": 4, "gradient_accumulation_steps": 2, "save_strategy": "no"}
    trainer = packed_trainer()(
        model=tiny_llama(),
        args=arguments(out, include_num_input_tokens_seen="non_padding", **options),
        train_dataset=sequences(60, labels=True),
        capacity=CAPACITY,
    )

    batches: list[Any] = []
    kept = trainer.compute_loss
    trainer.compute_loss = lambda model, inputs, *a, **k: (
        batches.append(inputs["batch"]) or kept(model, inputs, *a, **k)
    )

    result = trainer.train()
    return {
        "seen": trainer.state.num_input_tokens_seen,
        "tokens": sum(batch.stats.real_tokens for batch in batches),
        "rate": result.metrics["train_samples_per_second"] * result.metrics["train_runtime"],
        "sequences": sum(len(batch.lengths) for batch in batches),
    }


def test_totals_are_of_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(train, 2, str(tmp_path))
    assert first["seen"] == first["tokens"] + second["tokens"]
    assert first["rate"] == pytest.approx(first["sequences"] + second["sequences"], rel=0.01)


class TwoWeights(torch.optim.SGD):
    """Has weights of its own for evaluation, as schedule-free optimizers do: here, moved by one."""

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(1.0)


def test_an_optimizer_with_weights_for_evaluation_is_told_of_one(tmp_path: Path) -> None:
    trainer = packed_trainer()(model=tiny_llama(), args=arguments(tmp_path), capacity=CAPACITY)
    trainer.optimizer = TwoWeights(trainer.model.parameters(), lr=0.0)
    loss = trainer.evaluate(SAMPLES)["eval_loss"]
    assert loss == pytest.approx(mean_nll(SAMPLES, trainer.model)[0], rel=1e-12)
    assert loss != pytest.approx(mean_nll(SAMPLES)[0], rel=1e-3)


class Doubled(packed_trainer()):  # type: ignore[misc]
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().compute_loss(*args, **kwargs)


def test_a_set_without_loss_tokens_has_no_loss_and_is_read_as_data_kwargs_say(tmp_path: Path) -> None:
    setup = {"model": tiny_llama(), "args": arguments(tmp_path), "capacity": CAPACITY}
    metrics = packed_trainer()(**setup).evaluate([{"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}])
    assert np.isnan(metrics["eval_loss"])
    assert metrics["eval_loss_tokens"] == 0
    dropped = packed_trainer()(**setup, data_kwargs={"empty": "drop"})
    rows = [*SAMPLES, {"input_ids": [], "labels": []}]
    loss = packed_trainer()(**setup).evaluate(SAMPLES)["eval_loss"]
    assert dropped.evaluate(rows)["eval_loss"] == loss
    assert Doubled(**setup).evaluate(SAMPLES)["eval_loss"] == 2 * loss  # a subclass's loss is evaluated too
