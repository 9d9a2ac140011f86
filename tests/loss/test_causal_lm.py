from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_thd.batch import THDBatch
from lightning_thd.loss import causal_lm_loss
from lightning_thd.models import register_thd
from tests.loss.families import VOCAB, build, names

pytest.importorskip("transformers")
register_thd()


def make_batch(
    *, ignored: float = 0.0, lengths: tuple[int, ...] = (5, 9, 1, 13), pad_to: int | None = None
) -> THDBatch:
    generator = torch.Generator().manual_seed(1)
    samples = []
    for length in lengths:
        ids = torch.randint(3, VOCAB, (length,), generator=generator)
        labels = torch.where(torch.rand(length, generator=generator) < ignored, -100, ids)
        samples.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return THDBatch.collate(samples, pad_to=pad_to)


def oracle(model: nn.Module, batch: THDBatch) -> Tensor:
    """The model's own logits, whole."""
    outputs = model(**batch.hf_kwargs())
    total = F.cross_entropy(outputs.logits[0], batch.targets, reduction="sum") * batch.loss_scale
    if getattr(outputs, "aux_loss", None) is not None:
        total = total + outputs.aux_loss * model.config.router_aux_loss_coef
    return total


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model: nn.Module, batch: THDBatch, *, rtol: float = 1e-9, **kwargs: Any) -> None:
    loss = causal_lm_loss(model, batch, **kwargs)
    ours = gradients(model, loss)
    expected = oracle(model, batch)
    theirs = gradients(model, expected)
    assert loss.item() == pytest.approx(expected.item(), rel=rtol)
    assert ours.keys() == theirs.keys()
    assert len(ours) > 5
    for name, gradient in theirs.items():
        error = (ours[name] - gradient).norm() / gradient.norm().clamp_min(1e-9)
        assert error.item() < rtol, name


@pytest.mark.parametrize("name", names())
def test_every_family_equals_its_own_logits(name: str) -> None:
    model = build(name)
    assert_same(model, make_batch(ignored=0.4, pad_to=32))
    # again, with what the first call saw of the logits
    assert_same(model, make_batch())


def test_there_are_twelve_families_and_the_caps_matter() -> None:
    assert len(names()) >= 12
    model, batch = build("Gemma2"), make_batch()
    capped = causal_lm_loss(model, batch)
    model.config.final_logit_softcapping = None
    assert abs(capped.item() - causal_lm_loss(model, batch).item()) > 0.1
