"""Gemma3n: a trailing pad, whose embedding is zero, leaves every gradient finite and equal."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.families import build, compare, samples
from lightning_thd.batch import THDBatch
from lightning_thd.models import register_thd

register_thd()


def test_packed_with_a_trailing_pad_equals_alone() -> None:
    assert compare("causal", "gemma3n_text", "Gemma3nForCausalLM")[0] == "exact"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_finite(dtype: torch.dtype) -> None:
    model = build("gemma3n_text", "Gemma3nForCausalLM", "thd").to(dtype)
    batch = THDBatch.collate([{"input_ids": ids} for ids in samples()], pad_to=48)
    targets = batch.targets[None]
    model(**batch.hf_kwargs(), labels=targets, shift_labels=targets).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
