"""Classifiers and masked language models under packed_trainer equal the same model one sequence at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    TrainingArguments,
)

from lightning_thd import THDBatch, THDDataModule
from lightning_thd.batch.noted import NotedBatch
from lightning_thd.integrations import packed_trainer, prepare_fabric

VOCAB = 40
CLASSES = 3
LENGTHS = [5, 9, 2, 7, 4, 12, 3, 6]


def model_of(auto: Any) -> Any:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0, num_labels=CLASSES,
    )  # fmt: skip
    return auto.from_config(config, attn_implementation="thd").double()


def rows(per_token: bool) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)
    samples = []
    for i, length in enumerate(LENGTHS):
        ids = torch.randint(5, VOCAB, (length,), generator=draw).tolist()
        labels = [-100, *torch.randint(0, CLASSES, (length - 1,), generator=draw).tolist()]
        samples.append({"input_ids": ids, **({"labels": labels} if per_token else {"label": i % CLASSES})})
    return samples


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
        logging_steps=1, learning_rate=1e-2, adam_epsilon=1e-3, lr_scheduler_type="constant",
        max_grad_norm=0.0, **options,
    )  # fmt: skip


def loss_alone(model: Any, samples: list[dict[str, Any]], per_token: bool) -> torch.Tensor:
    """Mean over sequences or labelled tokens, one row at a time, as transformers computes it."""
    losses = []
    tokens = 0
    for sample in samples:
        ids = torch.tensor([sample["input_ids"]])
        labels = torch.tensor([sample["labels"]] if per_token else [sample["label"]])
        count = int((labels != -100).sum())
        losses.append(model(input_ids=ids, labels=labels).loss * count)
        tokens += count
    return torch.stack(losses).sum() / tokens


@pytest.mark.parametrize(
    ("auto", "per_token"),
    [
        (AutoModelForSequenceClassification, False),
        (AutoModelForTokenClassification, True),
        (AutoModelForMaskedLM, True),
    ],
)
def test_a_pass_of_all_rows_equals_one_row_at_a_time(auto: Any, per_token: bool, tmp_path: Path) -> None:
    model = model_of(auto)
    samples = rows(per_token)
    with torch.no_grad():
        expected = loss_alone(model, samples, per_token).item()
    trainer = packed_trainer()(
        model=model,
        args=arguments(tmp_path, max_steps=1, gradient_accumulation_steps=1),
        train_dataset=samples,
        eval_dataset=samples,
        capacity=24,
        peak=1e12,
    )

    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-9)
    output = trainer.predict(samples)
    if not per_token:
        assert output.predictions.shape == (len(samples), CLASSES)
        assert output.label_ids.tolist() == [sample["label"] for sample in samples]

    trainer.train()
    assert trainer.state.global_step == 1


def test_heads_of_places_and_smoothing_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="BertForQuestionAnswering"):
        packed_trainer()(model=model_of(AutoModelForQuestionAnswering), args=arguments(tmp_path), capacity=24)
    with pytest.raises(ValueError, match="label_smoothing_factor"):
        packed_trainer()(
            model=model_of(AutoModelForMaskedLM),
            args=arguments(tmp_path, label_smoothing_factor=0.1),
            capacity=24,
        )


def test_rows_whose_labels_would_be_wrong_are_refused(tmp_path: Path) -> None:
    tagger = model_of(AutoModelForTokenClassification)
    classifier = model_of(AutoModelForSequenceClassification)
    with pytest.raises(ValueError, match="oversize='split' with a BertForTokenClassification"):
        packed_trainer()(
            model=tagger, args=arguments(tmp_path), capacity=24, data_kwargs={"oversize": "split"}
        )

    bad: list[tuple[Any, dict[str, Any], str]] = [
        (tagger, {"input_ids": [5, 6]}, "has no labels"),
        (tagger, {"input_ids": [5, 6], "labels": [1, 2]}, "label for its first token"),
        (classifier, {"input_ids": [5, 6]}, "has no label"),
        (classifier, {"input_ids": [5], "label": 1}, "has one token"),
        (classifier, {"input_ids": [5, 6], "label": 1, "weights": 2.0}, "reads no weights"),
    ]
    for model, row, message in bad:
        trainer = packed_trainer()(model=model, args=arguments(tmp_path), capacity=24)
        with pytest.raises(ValueError, match=message):
            trainer.evaluate([row])


def test_copies_of_a_batch_read_no_scale() -> None:
    """A loss that moves or replaces its batch is noted for the scale that it uses afterwards."""
    noted = NotedBatch.of(THDBatch.collate(rows(False)))
    copy = noted.replace(set_name="x").to("meta")
    assert noted.read == set()
    assert copy.sequence_scale == pytest.approx(1 / len(LENGTHS))
    assert noted.read == {"sequence_scale"}


def test_a_loop_evaluates_a_classifier_by_sequences() -> None:
    """The model's own mean, and the line of classification.md, on packs of different numbers of sequences."""
    host = L.Fabric(accelerator="cpu", devices=1)
    host.launch()
    model = model_of(AutoModelForSequenceClassification)
    samples = rows(False)
    with torch.no_grad():
        expected = loss_alone(model, samples, False).item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [THDBatch.collate(samples[:1]), THDBatch.collate(samples[1:])]

    def own(model: Any, batch: THDBatch) -> torch.Tensor:
        loss: torch.Tensor = model(**batch.hf_kwargs()).loss
        return loss

    def documented(model: Any, batch: THDBatch) -> torch.Tensor:
        assert batch.sequence_scale is not None
        loss: torch.Tensor = model(**batch.hf_kwargs()).loss
        return loss * len(batch) * batch.sequence_scale

    for loss_fn in (own, documented):
        data = THDDataModule(samples, capacity=24)
        loop = prepare_fabric(host, model, data, optimizer, loss_fn=loss_fn, peak=1e12)
        assert loop.evaluate(batches)["val/loss"] == pytest.approx(expected, rel=1e-6)
    loop = prepare_fabric(host, model, THDDataModule(samples, capacity=24), optimizer, loss_fn=own, peak=1e12)
    step: Any = next(iter(loop.loader))
    with pytest.warns(UserWarning, match="loss_fn read no scale"):
        loop.backward(step)
