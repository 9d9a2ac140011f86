"""Labels of whole sequences: from a sample to a classifier's own loss, and pooled rows for other models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import lightning.pytorch as L
import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    LlamaConfig,
)

from lightning_thd import THDBatch, THDDataModule, causal_lm_loss
from lightning_thd.alignment import Alignment
from tests.data.support import make_trainer
from tests.tiny import tiny_llama

VOCAB = 31
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
IDS = [[5, 6, 7], [8, 9], [4, 3, 2, 1, 11]]


def classifier(family: str, labels: int, auto: Any = AutoModelForSequenceClassification) -> Any:
    torch.manual_seed(0)
    config: Any = BertConfig if family == "bert" else LlamaConfig
    more = {"attention_probs_dropout_prob": 0.0} if family == "bert" else {}
    made = config(vocab_size=VOCAB, pad_token_id=0, num_labels=labels, **SIZES, **more)
    model = auto.from_config(made, attn_implementation="thd").double()
    return model.eval()


def samples(labels: list[Any], key: str = "label") -> list[dict[str, Any]]:
    return [{"input_ids": ids, key: label} for ids, label in zip(IDS, labels, strict=True)]


def one_by_one(model: Any, batch: THDBatch) -> float:
    """The mean of the losses of single padded rows, by the class's own rule."""
    losses = []
    for ids, label in zip(IDS, batch.extras["labels"], strict=True):
        row = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))}
        losses.append(loss_of(model, **row, labels=label[None], use_cache=False))
    return float(np.mean(losses))


@torch.no_grad()
def loss_of(model: Any, **arguments: Any) -> float:
    return float(model(**arguments).loss)


@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize("pad_to", [None, 16])
@pytest.mark.parametrize(
    ("labels", "number"),
    [([0, 2, 1], 3), ([0.5, -1.0, 2.0], 1), ([[1, 0], [0, 1], [1, 1]], 2)],
    ids=["classes", "regression", "several"],
)
def test_a_classifiers_own_loss_is_the_mean_over_the_batch(
    family: str, labels: list[Any], number: int, pad_to: int | None
) -> None:
    model = classifier(family, number)
    for key in ("label", "labels") if not isinstance(labels[0], list) else ("label",):
        batch = THDBatch.collate(samples(labels, key), pad_to=pad_to)
        extra = batch.hf_kwargs()["labels"]
        assert extra.shape[0] == 3
        assert extra.dtype == (torch.int64 if number == 3 else torch.float32)
        batch = batch.replace(extras={"labels": extra.double() if number < 3 else extra})
        found = loss_of(model, **batch.hf_kwargs())
        assert found == pytest.approx(one_by_one(model, batch), rel=1e-9)


def test_a_causal_loss_looks_past_the_labels_of_sequences() -> None:
    labelled = THDBatch.collate(samples([0, 1, 0]))
    plain = THDBatch.collate([{"input_ids": ids} for ids in IDS])
    model = tiny_llama()
    with torch.no_grad(), pytest.warns(UserWarning, match="causal_lm_loss does not use the label"):
        assert float(causal_lm_loss(model, labelled)) == float(causal_lm_loss(model, plain))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, None, 1], "have a label of another shape than others, or none"),
        ([[0, 1], [1], [1, 1]], "have a label of another shape"),
        (["pos", "neg", "pos"], "label='pos'; wanted one finite number"),
        ([float("nan"), 0.0, 1.0], "label=nan; wanted one finite number"),
        ([[[1]], [[2]], [[3]]], "wanted one finite number for the sequence"),
    ],
)
def test_other_labels_are_refused(labels: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        THDBatch.collate(samples(labels))


class Classifies(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = classifier("bert", 2).train()
        self.losses: list[float] = []

    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch.hf_kwargs()).loss
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: THDBatch, batch_idx: int) -> None:
        self.log("val/loss", self.model(**batch.hf_kwargs()).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def rows(number: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 20, number).tolist()
    return [{"input_ids": rng.integers(1, VOCAB, n).tolist(), "label": i % 2} for i, n in enumerate(lengths)]


def columns(given: list[dict[str, Any]], name: str) -> Any:
    table = {"input_ids": [row["input_ids"] for row in given], name: [row["label"] for row in given]}
    return datasets.Dataset.from_dict(table)


def parquet(given: list[dict[str, Any]], folder: Path) -> str:
    columns(given, "label").add_column("text", ["left out"] * len(given)).to_parquet(folder / "rows.parquet")
    return str(folder / "rows.parquet")


SOURCES = ["list", "columns", "scalar labels", "scalar labels in a list", "stream", "parquet"]


@pytest.mark.parametrize("source", SOURCES)
def test_labels_reach_the_model_from_every_source(source: str, tmp_path: Path) -> None:
    given = rows(24)
    train: Any = {
        "list": lambda: given,
        "columns": lambda: columns(given, "label"),
        "scalar labels": lambda: columns(given, "labels"),
        "scalar labels in a list": lambda: [
            {"input_ids": r["input_ids"], "labels": r["label"]} for r in given
        ],
        "stream": lambda: lambda: iter(given),
        "parquet": lambda: parquet(given, tmp_path),
    }[source]()
    by_ids = {tuple(row["input_ids"]): row["label"] for row in given}
    seen = 0

    class Checks(Classifies):
        def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
            nonlocal seen
            ids = [tuple(row.tolist()) for row in batch.unpack(batch.input_ids)]
            assert batch.hf_kwargs()["labels"].tolist() == [by_ids[one] for one in ids]
            seen += len(ids)
            return super().training_step(batch, batch_idx)

    make_trainer().fit(Checks(), THDDataModule(train, capacity=40, cache_dir=tmp_path))
    assert seen == 24


def test_the_mean_of_an_evaluation_is_that_over_its_sequences() -> None:
    module, given = Classifies(), rows(30)
    [found] = make_trainer().validate(module, THDDataModule(val=given, capacity=64), verbose=False)
    whole = loss_of(module.model.eval(), **THDBatch.collate(given).hf_kwargs())
    assert found["val/loss"] == pytest.approx(whole, rel=1e-6)


def test_long_labelled_sequences_are_truncated_but_never_split() -> None:
    given = [*rows(6), {"input_ids": [3] * 50, "label": 1}]
    make_trainer().fit(Classifies(), THDDataModule(given, capacity=40, oversize="truncate"))
    with pytest.raises(ValueError, match="50 tokens and a label, so it cannot be split"):
        make_trainer().fit(Classifies(), THDDataModule(given, capacity=40, oversize="split"))


def test_an_empty_microbatch_of_labelled_data_has_a_loss_of_zero() -> None:
    from lightning_thd.data.loader import BatchMaker
    from lightning_thd.data.store.index import build_index
    from lightning_thd.packing import Spans

    given = rows(3)
    nothing = np.empty(0, np.int64)
    spans = Spans(index=nothing, start=nothing, stop=nothing, continued=nothing.astype(bool))
    batch = BatchMaker(dataset=given, index=build_index(given)).batch(spans)
    assert batch.hf_kwargs()["labels"].shape == (0,)
    loss = classifier("bert", 2)(**batch.hf_kwargs()).loss
    assert loss.item() == 0.0
    loss.backward()


def test_token_classification_by_labels_a_token() -> None:
    """The first token, [CLS] and the like, has no label: packs keep the targets of next tokens."""
    model = classifier("bert", 5, AutoModelForTokenClassification)
    tags = [[-100, 1, 2], [-100, 4], [-100, 0, 3, -100, 2]]
    batch = THDBatch.collate(
        [{"input_ids": i, "labels": t} for i, t in zip(IDS, tags, strict=True)], pad_to=16
    )
    found = loss_of(model, **batch.hf_kwargs(), labels=batch.targets.roll(1)[None])
    total, number = torch.zeros((), dtype=torch.float64), 0
    for ids, labels in zip(IDS, tags, strict=True):
        row = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))}
        logits = model(**row).logits[0].detach()
        total = total + cross_entropy(logits, torch.tensor(labels), reduction="sum")
        number += sum(label >= 0 for label in labels)
    assert found == pytest.approx(float(total) / number, rel=1e-9)


@pytest.mark.parametrize("how", ["last", "mean", "first"])
@pytest.mark.parametrize(
    "options", [{}, {"pad_to": 16}, {"align": Alignment(sequence_multiple=4, total_multiple=4)}]
)
def test_pooled_rows_are_those_of_every_sequence(how: Any, options: dict[str, Any]) -> None:
    batch = THDBatch.collate([{"input_ids": ids} for ids in IDS], **options)
    x = torch.randn(len(batch.input_ids), 4, dtype=torch.float64, requires_grad=True)
    by_hand = {"last": lambda row: row[-1], "mean": lambda row: row.mean(0), "first": lambda row: row[0]}
    wanted = torch.stack([by_hand[how](row) for row in batch.unpack(x)])
    for given in (x, x[None]):
        assert torch.allclose(batch.pool(given, how), wanted, rtol=1e-12)
    assert batch.pool(x.detach().bfloat16(), how).dtype == torch.bfloat16
    batch.pool(x, how).sum().backward()
    assert x.grad is not None


def test_pooling_refuses_what_it_cannot_do() -> None:
    batch = THDBatch.collate([{"input_ids": [1, 2]}])
    with pytest.raises(ValueError, match="wanted one of last, mean, first"):
        batch.pool(torch.zeros(2, 4), "max")  # type: ignore[arg-type]
    empty = THDBatch.from_padded(torch.ones(2, 2, dtype=torch.long), torch.tensor([[1, 1], [0, 0]]))
    with pytest.raises(ValueError, match="Sequence 1 of the batch has no tokens to pool"):
        empty.pool(torch.zeros(2, 4))
