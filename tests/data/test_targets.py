"""Weights of tokens and sequences, and labels of whole sequences, from the data to the loss."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import lightning.pytorch as L
import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, BertConfig, LlamaConfig

from lightning_thd import THDBatch, THDDataModule, causal_lm_loss
from lightning_thd.alignment import Alignment
from lightning_thd.data.loader import BatchMaker, PlannedSteps, THDLoader
from lightning_thd.data.store.index import build_index
from lightning_thd.packing import PackPlanner, Packs, Sequences
from tests.data.support import make_trainer, read_piece
from tests.tiny import tiny_llama

Sample = dict[str, Any]


def make_samples(count: int, kind: str) -> list[Sample]:
    rng = np.random.default_rng(7)
    samples = []
    for i in range(count):
        n = int(rng.integers(1, 40))
        ids = rng.integers(1, 90, n)
        weights: Any = (
            np.float32(rng.uniform(0, 3)) if kind == "sequence" or (kind == "both" and i % 2) else None
        )
        if weights is None:
            weights = (rng.uniform(0, 2, n) * (rng.random(n) < 0.8)).astype(np.float32)
        labels = np.where(rng.random(n) < 0.3, -100, ids)
        samples.append({"input_ids": ids, "labels": labels, "weights": weights})
    return samples


def brute_force(samples: list[Sample]) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """Weight of every (sequence, token) among tokens, and among sequences; each sums to 1."""
    tokens = {}
    sequences = {}

    for i, sample in enumerate(samples):
        whole = np.ndim(sample["weights"]) == 0
        row = np.broadcast_to(sample["weights"], len(sample["input_ids"])).astype(np.float64)
        of_targets = {j: row[j] for j in range(1, len(row)) if sample["labels"][j] != -100}
        total = sum(of_targets.values())
        of_sequence = float(sample["weights"]) if whole else 1.0
        for j, weight in of_targets.items():
            tokens[i, j] = weight
            if total > 0:
                sequences[i, j] = weight / total * of_sequence

    token_shares = {key: weight / sum(tokens.values()) for key, weight in tokens.items()}
    sequence_shares = {key: weight / sum(sequences.values()) for key, weight in sequences.items()}
    return token_shares, sequence_shares


@pytest.mark.parametrize("kind", ["token", "sequence", "both"])
@pytest.mark.parametrize(("oversize", "capacity"), [("own_pack", 64), ("split", 16)])
@pytest.mark.parametrize("dp", [1, 3])
def test_the_microbatches_of_a_step_weigh_what_the_brute_force_does(
    kind: str, oversize: Any, capacity: int, dp: int
) -> None:
    """The weight of every token in a step, by tokens and by sequences, is its share of all weights."""
    samples = make_samples(24, kind)
    index = build_index(samples)
    weigh = partial(index.loss_weights, samples)
    planner = PackPlanner(
        index.lengths, capacity, global_batch=Sequences(24), oversize=oversize, loss_tokens=weigh
    )
    maker = BatchMaker(dataset=samples, index=index)
    by_tokens: dict[tuple[int, int], float] = {}
    by_sequences: dict[tuple[int, int], float] = {}
    for rank in range(dp):
        (step,) = THDLoader(PlannedSteps(planner, maker, rank=rank, dp=dp, kind="step"))
        plan = planner.step(0, 0, dp).microbatches(rank)
        for batch, spans in zip(step.microbatches, plan, strict=True):
            assert batch.weights is not None
            assert batch.sequence_scale is not None
            share_of_microbatch = 1.0 / dp / len(plan)
            sequences = zip(
                spans.index.tolist(),
                spans.start.tolist(),
                batch.unpack(batch.weights),
                batch.sequence_shares,
                strict=True,
            )
            for i, start, weights, share in sequences:
                for token, weight in enumerate(weights.tolist(), start=start + 1):
                    if weight:
                        by_tokens[i, token] = weight * batch.loss_scale * share_of_microbatch
                        of_sequence = weight * share * batch.sequence_scale
                        by_sequences[i, token] = of_sequence * share_of_microbatch

    for ours, brute in zip((by_tokens, by_sequences), brute_force(samples), strict=True):
        expected = {key: weight for key, weight in brute.items() if weight}
        assert ours.keys() == expected.keys()
        assert len(ours) > 50
        assert max(abs(ours[key] - expected[key]) for key in expected) < 1e-9


def test_a_truncated_sequence_counts_what_is_left_of_it() -> None:
    """Weights and scales of a plan count only tokens before the cut."""
    samples = [{"input_ids": list(range(1, 9)), "weights": 2.0}, {"input_ids": [5, 6]}]
    samples[1]["weights"] = [1.0, 0.5]
    index = build_index(samples)
    weigh = partial(index.loss_weights, samples)
    planner = PackPlanner(index.lengths, 4, global_batch=Packs(2), oversize="truncate", loss_tokens=weigh)
    (plan,) = (planner.step(0, k, 1) for k in range(len(planner)))
    assert plan.loss_tokens == pytest.approx(3 * 2.0 + 0.5)
    assert plan.scales() == pytest.approx((2 / 6.5, 2 / 3.0))


@pytest.mark.parametrize("labels", [None, [[1, -100, 3], [4, 5]]])
def test_without_weights_shares_are_means_and_padded_rows_agree(labels: list[list[int]] | None) -> None:
    """A sequence's share is one over its loss tokens, from samples and from padded rows alike."""
    ids = [[1, 2, 3], [4, 5]]
    samples: list[Sample] = [{"input_ids": row} for row in ids]
    for sample, row in zip(samples, labels or [], strict=False):
        sample["labels"] = row
    batch = THDBatch.collate(samples)
    assert batch.weights is None
    assert batch.sequence_shares == ((1.0, 1.0) if labels else (0.5, 1.0))
    assert batch.sequence_scale == 0.5
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    padded_labels = None if labels is None else torch.tensor([labels[0], [*labels[1], 0]])
    padded = THDBatch.from_padded(torch.tensor([[1, 2, 3], [4, 5, 0]]), mask, padded_labels)
    assert padded.sequence_shares == batch.sequence_shares
    assert padded.sequence_scale == batch.sequence_scale
    assert padded.loss_scale == batch.loss_scale


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, 2.0], r"(Sample|Sequence) 0 has 3 input_ids but weights of shape \(2,\)"),
        ("heavy", "weights of shape"),
        ([1.0, -2.0, 1.0], r"has the weight -2.0. Weights are finite and at least 0"),
        (float("nan"), "has the weight nan"),
    ],
)
def test_weights_that_are_none(weights: Any, message: str) -> None:
    """Weights of another length, that are no numbers, negative or NaN are refused, wherever they enter."""
    for take in (THDBatch.collate, build_index):
        with pytest.raises(ValueError, match=message):
            take([{"input_ids": [1, 2, 3], "weights": weights}])


def test_weights_that_were_not_counted_are_refused() -> None:
    """A data set with ``lengths`` is not read to be counted, so a weight in its rows is refused later."""

    class Lengths(list[Sample]):
        lengths = (3, 3)

    samples = Lengths([{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2, 3], "weights": 2.0}])
    index = build_index(samples)
    with pytest.raises(ValueError, match="Sequence 1 has weights, but none were counted"):
        read_piece(index, samples, 1, 0, 3)


@pytest.mark.parametrize("weights", [2.5, 1, [9.0, 1.0, 2.5]])
def test_weights_and_targets_that_change_after_they_were_counted_are_refused(weights: Any) -> None:
    """Rows that draw other weights or labels at every read would make the step's scales wrong."""
    index = build_index([{"input_ids": [1, 2, 3], "weights": 2.0}])
    hidden = {"input_ids": [1, 2, 3], "labels": [1, -100, 3], "weights": 4.0}
    for stop in (3, 2):  # whole, and cut
        with pytest.raises(ValueError, match=r"0 has \([\d., ]+\) as the sum and .* weights, but \(4.0"):
            read_piece(index, [{"input_ids": [1, 2, 3], "weights": weights}], 0, 0, stop)
        with pytest.raises(ValueError, match="has 1 loss tokens, but 2 were counted.*an IterableDataset"):
            read_piece(index, [hidden], 0, 0, stop)


class Logging(L.LightningModule):
    """Logs the mean over an epoch of its loss in training and validation, and trains nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_llama(torch.float64)

    def training_step(self, batch: THDBatch, batch_idx: int) -> Any:
        loss = causal_lm_loss(self.model, batch)
        self.log("train", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: THDBatch, batch_idx: int) -> None:
        self.log("val", causal_lm_loss(self.model, batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize(
    "weights", [[0.01, 0.001, 0.02, 0.3, 0.004, 0.05], [0.7, 1.3, 2.1, 0.1, 0.9, 1.7], None]
)
def test_epoch_means_are_exact_where_the_weight_of_a_batch_is_no_whole_number(
    weights: list[float] | None, tmp_path: Path
) -> None:
    """Lightning's epoch means weigh batches by the sum of their weights, not by its nearest whole number."""
    rng = np.random.default_rng(3)
    samples: list[Sample] = [{"input_ids": rng.integers(3, 60, n)} for n in (5, 9, 3, 7, 12, 4)]
    for sample, weight in zip(samples, weights or (), strict=False):
        sample["weights"] = weight

    module = Logging()
    with torch.no_grad():
        batches = [THDBatch.collate([sample]) for sample in samples]
        totals = [1 / batch.loss_scale for batch in batches]
        losses = [float(causal_lm_loss(module.model, batch)) for batch in batches]
    mean = float(np.average(losses, weights=totals))

    trainer = make_trainer(accumulate_grad_batches=2, default_root_dir=tmp_path)
    trainer.fit(module, THDDataModule(samples, capacity=16, val=samples, cache_dir=tmp_path))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert logged == pytest.approx({"train": mean, "val": mean}, rel=2e-7)


VOCAB = 31
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
IDS = [[5, 6, 7], [8, 9], [4, 3, 2, 1, 11]]


def classifier(family: str, labels: int, auto: Any = AutoModelForSequenceClassification) -> Any:
    """A small model of a family with some labels, in fp64."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0, "num_labels": labels, **SIZES}
    if family == "bert":
        config: Any = BertConfig(**options, attention_probs_dropout_prob=0.0)
    else:
        config = LlamaConfig(**options)
    model = auto.from_config(config, attn_implementation="thd").double()
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
        loss = loss_of(model, **batch.hf_kwargs())
        assert loss == pytest.approx(one_by_one(model, batch), rel=1e-9)


def test_a_causal_loss_looks_past_the_labels_of_sequences() -> None:
    labelled = THDBatch.collate(samples([0, 1, 0]))
    plain = THDBatch.collate([{"input_ids": ids} for ids in IDS])
    model = tiny_llama()
    with torch.no_grad(), pytest.warns(UserWarning, match="causal_lm_loss does not use the label"):
        assert float(causal_lm_loss(model, labelled)) == float(causal_lm_loss(model, plain))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, None, 1], "labels of a batch have several shapes, or a sample has none"),
        ([[0, 1], [1], [1, 1]], "labels of a batch have several shapes"),
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
    samples = rows(24)
    train: Any = {
        "list": lambda: samples,
        "columns": lambda: columns(samples, "label"),
        "scalar labels": lambda: columns(samples, "labels"),
        "scalar labels in a list": lambda: [
            {"input_ids": r["input_ids"], "labels": r["label"]} for r in samples
        ],
        "stream": lambda: lambda: iter(samples),
        "parquet": lambda: parquet(samples, tmp_path),
    }[source]()
    by_ids = {tuple(row["input_ids"]): row["label"] for row in samples}
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


@pytest.mark.parametrize("source", ["rows", "jsonl", "columns", "parquet", "mixture"])
def test_names_of_classes_are_refused_for_a_classifier(source: str, tmp_path: Path) -> None:
    records = [{"text": "good", "label": "pos"}, {"text": "bad", "label": "neg"}]
    ids = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]], "label": ["pos", "neg"]})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    ids.to_parquet(tmp_path / "a.parquet")
    mixture = {"a": (str(tmp_path / "a.jsonl"), 1.0)}
    made: dict[str, Any] = {"rows": records, "columns": ids, "mixture": mixture}
    train = made.get(source, str(tmp_path / f"a.{source}"))
    data = THDDataModule(train, capacity=40, cache_dir=tmp_path, tokenizer=lambda text: [1] * len(text))
    with pytest.raises(ValueError, match="label='pos'.*wanted one finite|label='pos', but BertForSequence"):
        make_trainer().fit(Classifies(), data)


def test_the_mean_of_an_evaluation_is_that_over_its_sequences() -> None:
    module = Classifies()
    samples = rows(30)
    [logged] = make_trainer().validate(module, THDDataModule(val=samples, capacity=64), verbose=False)
    whole = loss_of(module.model.eval(), **THDBatch.collate(samples).hf_kwargs())
    assert logged["val/loss"] == pytest.approx(whole, rel=1e-6)


def test_long_labelled_sequences_are_truncated_but_never_split() -> None:
    samples = [*rows(6), {"input_ids": [3] * 50, "label": 1}]
    make_trainer().fit(Classifies(), THDDataModule(samples, capacity=40, oversize="truncate"))
    with pytest.raises(ValueError, match=r"50 tokens\) has a label: set oversize='truncate'"):
        make_trainer().fit(Classifies(), THDDataModule(samples, capacity=40, oversize="split"))


def test_an_empty_microbatch_of_labelled_data_has_a_loss_of_zero() -> None:
    from lightning_thd.data.loader import BatchMaker
    from lightning_thd.data.store.index import build_index
    from lightning_thd.packing import Spans

    samples = rows(3)
    nothing = np.empty(0, np.int64)
    spans = Spans(index=nothing, start=nothing, stop=nothing, continued=nothing.astype(bool))
    batch = BatchMaker(dataset=samples, index=build_index(samples)).batch(spans)
    assert batch.hf_kwargs()["labels"].shape == (0,)
    loss = classifier("bert", 2)(**batch.hf_kwargs()).loss
    assert loss.item() == 0.0
    loss.backward()


@pytest.mark.parametrize("how", ["last", "mean", "first"])
@pytest.mark.parametrize(
    "options", [{}, {"pad_to": 16}, {"align": Alignment(sequence_multiple=4, total_multiple=4)}]
)
def test_pooled_rows_are_those_of_every_sequence(how: Any, options: dict[str, Any]) -> None:
    batch = THDBatch.collate([{"input_ids": ids} for ids in IDS], **options)
    x = torch.randn(len(batch.input_ids), 4, dtype=torch.float64, requires_grad=True)
    by_hand = {"last": lambda row: row[-1], "mean": lambda row: row.mean(0), "first": lambda row: row[0]}
    expected = torch.stack([by_hand[how](row) for row in batch.unpack(x)])
    for hidden in (x, x[None]):
        assert torch.allclose(batch.pool(hidden, how), expected, rtol=1e-12)
    assert batch.pool(x.detach().bfloat16(), how).dtype == torch.bfloat16
    batch.pool(x, how).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_model_that_another_takes_the_attention_of_is_named_and_refused(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = Classifies()
    data = THDDataModule(rows(12), capacity=40)
    module.model = classifier(family, 2).float().train()
    batch = THDBatch.collate(samples([0, 1, 0]))

    assert module.model(**batch.hf_kwargs()).logits.shape == (3, 2)
    AutoModelForSequenceClassification.from_config(module.model.config, attn_implementation="eager")
    module.model.config._attn_implementation = "eager"  # a later transformers copies the config

    with (
        caplog.at_level("INFO"),
        pytest.raises(ValueError, match="was given 'thd', got a pack and runs attn_implementation='eager'"),
    ):
        make_trainer().fit(module, data)
    assert (
        "Classification runs attn_implementation='eager', under which sequences of a pack may see each other"
        in caplog.text
    )
    assert "copy of the config" not in caplog.text  # no other model has this one

    module.model(input_ids=batch.input_ids[None, :3])  # a row by itself is none
    module.model.set_attn_implementation("thd")
    assert module.model(**batch.hf_kwargs()).logits.shape == (3, 2)
