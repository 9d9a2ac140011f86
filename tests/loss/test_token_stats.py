"""Entropy and accuracy beside the loss: of the same forward pass, without changing it."""

from __future__ import annotations

import pytest
import torch

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.loss import causal_lm_loss_and_stats
from tests.tiny import sequences, tiny_llama


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_statistics_are_those_of_whole_logits_and_the_loss_is_the_same(smoothing: float) -> None:
    batch = THDBatch.collate(sequences(6, labels=True))
    model, other = tiny_llama(), tiny_llama()
    loss, stats = causal_lm_loss_and_stats(model, batch, label_smoothing=smoothing)
    wanted = causal_lm_loss(other, batch, label_smoothing=smoothing)
    loss.backward()
    wanted.backward()
    assert torch.equal(loss, wanted)
    for found, own in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(found.grad, own.grad)
    known = batch.targets != -100
    with torch.no_grad():
        logp = model(**batch.hf_kwargs()).logits[0][known].log_softmax(-1)
    assert float(stats.entropy) == pytest.approx(float(-(logp * logp.exp()).sum()), rel=1e-12)
    assert int(stats.correct) == int((logp.argmax(-1) == batch.targets[known]).sum())
    assert int(stats.tokens) == int(known.sum()) == batch.loss_tokens
    assert not any(value.requires_grad for value in stats)


def test_a_batch_without_a_target_has_none_to_count() -> None:
    batch = THDBatch.collate([{"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}])
    loss, stats = causal_lm_loss_and_stats(tiny_llama(), batch)
    assert float(loss.detach()) == 0.0
    assert [float(value) for value in stats] == [0.0, 0.0, 0.0]
