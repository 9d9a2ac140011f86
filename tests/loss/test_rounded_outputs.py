"""Wrappers that round what leaves a model, or its buffers, change neither the loss nor the positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_thd import causal_lm_loss
from lightning_thd.loss import head_call
from tests.loss.families import build
from tests.loss.support import gradients, make_batch

LENGTHS = (9, 30, 2)


class RoundsOutputs(nn.Module):
    """Does what FSDP2 does with an ``output_dtype``, which Accelerate sets for bf16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, **kwargs: Any) -> dict[str, torch.Tensor]:
        return {name: value.bfloat16() for name, value in self.module(**kwargs).items()}


def test_a_loss_is_not_rounded_by_an_output_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_call, "is_users", lambda file: False)  # FSDP2 is no user's code
    model, batch = build("Llama").train(), make_batch(lengths=LENGTHS)
    loss, rounded = causal_lm_loss(model, batch), causal_lm_loss(RoundsOutputs(model), batch)
    assert rounded.dtype == loss.dtype == torch.float64  # that of the test model
    assert torch.equal(loss, rounded)
    wanted, found = gradients(model, loss), gradients(model, rounded)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())


def test_rotary_frequencies_stay_in_fp32() -> None:
    model, batch = build("Llama").train(), make_batch(lengths=LENGTHS)
    loss, rotary = causal_lm_loss(model, batch), model.model.rotary_emb
    rotary.to(torch.bfloat16)  # FSDP1 does so to all buffers of its mixed precision
    assert torch.equal(causal_lm_loss(model, batch), loss)
    assert rotary.inv_freq.dtype == torch.float32


def test_frequencies_set_by_hand_are_left_as_they_are() -> None:
    model, batch = build("Llama").train(), make_batch(lengths=LENGTHS)
    rotary = model.model.rotary_emb
    rotary.inv_freq = (rotary.inv_freq * 3).to(torch.bfloat16)
    causal_lm_loss(model, batch)
    assert rotary.inv_freq.dtype == torch.bfloat16
