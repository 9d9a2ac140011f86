"""Reductions and weights of the loss, against whole logits, over microbatches, ranks and shards."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_thd.alignment import Alignment
from lightning_thd.batch import THDBatch
from lightning_thd.batch.thd_batch import collate_checked
from lightning_thd.data.loader import BatchMaker, PlannedSteps, THDLoader
from lightning_thd.data.store.index import build_index
from lightning_thd.integrations.packed_loop import mean_loss
from lightning_thd.loss import causal_lm_loss
from lightning_thd.loss.causal_lm import loss_weights
from lightning_thd.models import register_thd
from lightning_thd.packing import PackPlanner, Sequences
from lightning_thd.parallel.shard import shard_batch
from tests.loss.families import VOCAB, build
from tests.loss.support import gradients, make_batch

pytest.importorskip("transformers")
register_thd()


def make_samples(weights: str, count: int = 12) -> list[dict[str, Any]]:
    """Samples of 1 to 13 tokens with masked labels, and weights of tokens, of sequences, or of both kinds."""
    generator = torch.Generator().manual_seed(3)
    samples = []
    for i in range(count):
        length = int(torch.randint(1, 14, (), generator=generator))
        ids = torch.randint(3, VOCAB, (length,), generator=generator)
        labels = torch.where(torch.rand(length, generator=generator) < 0.3, -100, ids)
        sample: dict[str, Any] = {"input_ids": ids, "labels": labels}
        if weights == "token" or (weights == "both" and i % 2):
            sample["weights"] = torch.rand(length, generator=generator).numpy()
        elif weights != "none":
            sample["weights"] = float(torch.rand((), generator=generator))
        samples.append(sample)
    return samples


def step_oracle(model: Any, samples: list[dict[str, Any]], reduction: str, smoothing: float) -> Tensor:
    """One sequence after the other, whole logits, no packing."""
    total = torch.zeros((), dtype=torch.float64)
    total_weight: Any = 0.0
    for sample in samples:
        batch = THDBatch.collate([{"input_ids": sample["input_ids"]}])
        z = model(**batch.hf_kwargs()).logits[0][:-1]
        labels = sample["labels"][1:]
        losses = F.cross_entropy(z, labels, reduction="none", label_smoothing=smoothing)

        sample_weights = torch.as_tensor(sample.get("weights", 1.0)).float().double()
        weights = sample_weights.expand(len(sample["input_ids"]))[1:] * (labels != -100)
        if not weights.sum():
            continue
        if reduction == "tokens":
            total = total + (weights * losses).sum()
            total_weight = total_weight + weights.sum()
        else:
            of_sequence = sample_weights if sample_weights.ndim == 0 else 1.0
            total = total + of_sequence * (weights * losses).sum() / weights.sum()
            total_weight = total_weight + of_sequence
    return total / total_weight


@pytest.mark.parametrize("weights", ["none", "token", "sequence", "both"])
@pytest.mark.parametrize("reduction", ["tokens", "sequences"])
def test_a_step_is_exact_over_ranks_and_microbatches(weights: str, reduction: Any) -> None:
    """The mean of all microbatches' losses is the loss, and has the gradient, of sequences run alone."""
    model = build("Llama")
    samples = make_samples(weights)
    smoothing = 0.1 if weights == "both" else 0.0
    index = build_index(samples)
    weigh = partial(index.loss_weights, samples)
    planner = PackPlanner(index.lengths, 24, global_batch=Sequences(len(samples)), loss_tokens=weigh)
    collate = partial(collate_checked, align=Alignment(sequence_multiple=2, total_multiple=4))
    maker = BatchMaker(dataset=samples, index=index, collate=collate)

    losses = []
    for rank in range(2):
        (step,) = THDLoader(PlannedSteps(planner, maker, rank=rank, dp=2, kind="step"))
        assert len(step.microbatches) > 1
        losses += [
            causal_lm_loss(model, batch, reduction=reduction, label_smoothing=smoothing)
            for batch in step.microbatches
        ]
    loss = torch.stack(losses).mean()

    expected = step_oracle(model, samples, reduction, smoothing)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    ours = gradients(model, loss)
    for name, gradient in gradients(model, expected).items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-7, atol=1e-12)


def test_further_weights_and_classes_multiply_and_leave_the_divisor_alone() -> None:
    """Weights passed to the loss multiply the tokens' losses, whose sum is divided by all loss tokens."""
    model = build("Llama")
    batch = make_batch(ignored=0.3)
    weights = torch.rand(len(batch.targets), dtype=torch.float64)
    weights[::3] = 0.0
    classes = torch.rand(VOCAB, dtype=torch.float64)
    z = model(**batch.hf_kwargs()).logits[0]
    losses = F.cross_entropy(z, batch.targets, reduction="none", weight=classes)
    loss = causal_lm_loss(model, batch, weights=weights * classes[batch.targets.clamp(0)])
    torch.testing.assert_close(loss, (losses * weights).sum() / batch.loss_tokens)


@pytest.mark.parametrize("reduction", ["tokens", "sequences"])
@pytest.mark.parametrize("cp", [2, 4])
def test_the_shards_of_a_pack_weigh_what_the_pack_does(reduction: Any, cp: int) -> None:
    """The weights of all shards' slots, put together, are those of the pack."""
    samples = make_samples("both", 5)
    batch = THDBatch.collate(samples, align=Alignment(sequence_multiple=2 * cp, total_multiple=2 * cp))
    _, of_pack = loss_weights(batch, reduction, None)(batch.targets, 0)
    of_shards = torch.zeros_like(of_pack)
    for rank in range(cp):
        shard = shard_batch(batch, group=None, cp=cp, rank=rank)
        _, weights = loss_weights(shard, reduction, None)(shard.targets, 0)
        of_shards[shard.boundaries.layout.own] += weights / cp
    torch.testing.assert_close(of_shards, of_pack)
    assert of_pack.count_nonzero() > 5


def test_an_evaluation_weighs_its_tokens_or_its_sequences() -> None:
    """The mean over batches is that over all tokens, or over all sequences for a loss that averages these."""
    model = build("Llama")
    samples = make_samples("both", 6)
    batches = [THDBatch.collate(samples[:2]), THDBatch.collate(samples[2:])]
    loss, tokens = mean_loss(causal_lm_loss, model, batches, device=torch.device("cpu"))
    assert loss == pytest.approx(step_oracle(model, samples, "tokens", 0.0).item(), rel=1e-9)
    assert tokens == sum(batch.loss_tokens for batch in batches)

    def by_sequence(model: Any, batch: THDBatch) -> Tensor:
        return causal_lm_loss(model, batch, reduction="sequences")

    loss, _ = mean_loss(by_sequence, model, batches, device=torch.device("cpu"))
    assert loss == pytest.approx(step_oracle(model, samples, "sequences", 0.0).item(), rel=1e-9)
