"""Wrappers that round what leaves a model, or its buffers, change neither the loss nor the positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.loss import head_call
from tests.tiny import tiny_llama


class RoundsOutputs(nn.Module):
    """Does what FSDP2 does with an ``output_dtype``, which Accelerate sets for bf16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, **kwargs: Any) -> dict[str, torch.Tensor]:
        return {name: value.bfloat16() for name, value in self.module(**kwargs).items()}


def _batch() -> THDBatch:
    return THDBatch.collate([{"input_ids": [i % 60 for i in range(length)]} for length in (9, 30, 2)])


def _gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    loss.backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    assert found
    return found


def test_a_loss_is_not_rounded_by_an_output_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_call, "is_users", lambda file: False)  # FSDP2 is no user's code
    model, batch = tiny_llama().train(), _batch()
    loss, rounded = causal_lm_loss(model, batch), causal_lm_loss(RoundsOutputs(model), batch)
    assert rounded.dtype == loss.dtype == torch.float64  # that of the test model
    assert torch.equal(loss, rounded)
    wanted = _gradients(model, loss)
    assert all(torch.equal(a, b) for a, b in zip(wanted, _gradients(model, rounded), strict=True))


def test_rotary_frequencies_stay_in_fp32() -> None:
    model, batch = tiny_llama().train(), _batch()
    loss, rotary = causal_lm_loss(model, batch), model.model.rotary_emb
    rotary.to(torch.bfloat16)  # FSDP1 does so to all buffers of its mixed precision
    assert torch.equal(causal_lm_loss(model, batch), loss)
    assert rotary.inv_freq.dtype == torch.float32


def test_frequencies_set_by_hand_are_left_as_they_are() -> None:
    model, batch = tiny_llama().train(), _batch()
    rotary = model.model.rotary_emb
    rotary.inv_freq = (rotary.inv_freq * 3).to(torch.bfloat16)
    causal_lm_loss(model, batch)
    assert rotary.inv_freq.dtype == torch.bfloat16
