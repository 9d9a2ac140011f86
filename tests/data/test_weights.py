"""Weights of tokens and sequences from the data: what every microbatch of a step makes of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch

from lightning_thd import THDDataModule, causal_lm_loss
from lightning_thd.batch import THDBatch
from lightning_thd.data.loader import BatchMaker, PlannedSteps, THDLoader
from lightning_thd.data.store.index import build_index
from lightning_thd.packing import PackPlanner, Packs, Sequences
from tests.data.support import make_trainer
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
    tokens, sequences = {}, {}
    for i, sample in enumerate(samples):
        whole = np.ndim(sample["weights"]) == 0
        row = np.broadcast_to(sample["weights"], len(sample["input_ids"])).astype(np.float64)
        own = {j: row[j] for j in range(1, len(row)) if sample["labels"][j] != -100}
        total = sum(own.values())
        for j, weight in own.items():
            tokens[i, j] = weight
            if total > 0:
                sequences[i, j] = weight / total * (float(sample["weights"]) if whole else 1.0)
    return [{key: x / sum(found.values()) for key, x in found.items()} for found in (tokens, sequences)]  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["token", "sequence", "both"])
@pytest.mark.parametrize(("oversize", "capacity"), [("own_pack", 64), ("split", 16)])
@pytest.mark.parametrize("dp", [1, 3])
def test_the_microbatches_of_a_step_weigh_what_the_brute_force_does(
    kind: str, oversize: Any, capacity: int, dp: int
) -> None:
    samples = make_samples(24, kind)
    index = build_index(samples)
    weigh = partial(index.loss_weights, samples)
    planner = PackPlanner(
        index.lengths, capacity, global_batch=Sequences(24), oversize=oversize, loss_tokens=weigh
    )
    maker = BatchMaker(dataset=samples, index=index)
    found: tuple[dict[tuple[int, int], float], ...] = ({}, {})
    for rank in range(dp):
        (step,) = THDLoader(PlannedSteps(planner, maker, rank=rank, dp=dp, kind="step"))
        plan = planner.step(0, 0, dp).microbatches(rank)
        for batch, spans in zip(step.microbatches, plan, strict=True):
            assert batch.weights is not None
            assert batch.sequence_scale is not None
            rows = (batch.unpack(batch.weights), batch.sequence_shares)
            every = zip(spans.index.tolist(), spans.start.tolist(), *rows, strict=True)
            for i, start, weights, share in every:
                for at, weight in enumerate(weights.tolist(), start=start + 1):
                    if weight:
                        mean = 1.0 / dp / len(plan)
                        found[0][i, at] = weight * batch.loss_scale * mean
                        found[1][i, at] = weight * share * batch.sequence_scale * mean
    for ours, theirs in zip(found, brute_force(samples), strict=True):
        theirs = {key: x for key, x in theirs.items() if x}
        assert ours.keys() == theirs.keys()
        assert len(ours) > 50
        assert max(abs(ours[key] - theirs[key]) for key in theirs) < 1e-9


def test_a_truncated_sequence_counts_what_is_left_of_it() -> None:
    samples = [{"input_ids": list(range(1, 9)), "weights": 2.0}, {"input_ids": [5, 6]}]
    samples[1]["weights"] = [1.0, 0.5]
    index = build_index(samples)
    weigh = partial(index.loss_weights, samples)
    planner = PackPlanner(index.lengths, 4, global_batch=Packs(2), oversize="truncate", loss_tokens=weigh)
    (plan,) = (planner.step(0, k, 1) for k in range(len(planner)))
    assert plan.loss_tokens == pytest.approx(3 * 2.0 + 0.5)
    assert plan.scales() == pytest.approx((2 / 6.5, 2 / 3.0))


def test_worked_batch() -> None:
    batch = THDBatch.collate(
        [
            {"input_ids": [5, 6, 7], "weights": [9.0, 1.0, 3.0]},
            {"input_ids": [5, 6], "labels": [5, -100], "weights": [1.0, 1.0]},
            {"input_ids": [5, 6], "weights": 2.0},
        ],
        pad_to=9,
    )
    assert batch.weights is not None
    assert batch.weights.tolist() == [1.0, 3.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0]
    assert batch.loss_scale == pytest.approx(1 / 6)
    assert batch.sequence_shares == (0.25, 0.0, 1.0)
    assert batch.sequence_scale == pytest.approx(1 / 3)


@pytest.mark.parametrize("labels", [None, [[1, -100, 3], [4, 5]]])
def test_without_weights_shares_are_means_and_padded_rows_agree(labels: list[list[int]] | None) -> None:
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
    with pytest.raises(ValueError, match=message):
        THDBatch.collate([{"input_ids": [1, 2, 3], "weights": weights}])
    with pytest.raises(ValueError, match=message):
        build_index([{"input_ids": [1, 2, 3], "weights": weights}])


def test_weights_that_were_not_counted_are_refused() -> None:
    class Lengths(list[Sample]):
        lengths = (3, 3)

    samples = Lengths([{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2, 3], "weights": 2.0}])
    index = build_index(samples)
    with pytest.raises(ValueError, match="Sequence 1 has weights, but none were counted"):
        index.sample(samples, 1, 0, 3)


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
    rng = np.random.default_rng(3)
    samples: list[Sample] = [{"input_ids": rng.integers(3, 60, n)} for n in (5, 9, 3, 7, 12, 4)]
    for sample, weight in zip(samples, weights or (), strict=False):
        sample["weights"] = weight
    module = Logging()
    with torch.no_grad():
        batches = [THDBatch.collate([sample]) for sample in samples]
        totals = [1 / batch.loss_scale for batch in batches]
        losses = [float(causal_lm_loss(module.model, batch)) for batch in batches]
    wanted = float(np.average(losses, weights=totals))
    trainer = make_trainer(accumulate_grad_batches=2, default_root_dir=tmp_path)
    trainer.fit(module, THDDataModule(samples, capacity=16, val=samples, cache_dir=tmp_path))
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert found == pytest.approx({"train": wanted, "val": wanted}, rel=2e-7)
