"""Padding for alignment changes neither the loss nor a gradient, whatever the recipe and the layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.alignment import Alignment
from tests.models.families import build
from tests.tiny import largest_error, sequences, tiny_llama

SETTINGS: list[dict[str, Any]] = [
    {"recipe": recipe, "tp": tp, "cp": cp, "sequence_parallel": tp > 1}
    for recipe in (None, "tensorwise", "blockwise", "mxfp8", "nvfp4")
    for tp, cp in ((1, 1), (2, 1), (1, 2), (4, 2))
]


def loss_and_gradients(model: Any, batch: THDBatch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = causal_lm_loss(model, batch)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


@pytest.mark.parametrize("family", ["llama", "mamba2", "bamba"])
def test_loss_and_gradients_are_those_of_the_bare_pack(family: str) -> None:
    model = tiny_llama() if family == "llama" else build(family, "thd").double()
    padded = 0
    for seed, setting in enumerate(SETTINGS if family == "llama" else SETTINGS[1::4]):
        samples = sequences(4, labels=True, seed=seed)
        bare = THDBatch.collate(samples)
        aligned = THDBatch.collate(samples, align=Alignment.for_(**setting))
        padded += len(aligned.input_ids) > len(bare.input_ids)
        assert aligned.loss_tokens == bare.loss_tokens > 0
        wanted, found = (loss_and_gradients(model, batch) for batch in (bare, aligned))
        assert largest_error(found, wanted) < 1e-12, setting
    assert padded > 2
