"""Packed equals unpacked, for every family of the support table, on stock transformers' own eager result."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from lightning_thd.models import register_thd
from tests.models import matrix
from tests.models.families import FAMILIES
from tests.models.matrix import checkpoint, thd_model

register_thd()
# fp32 rounding of two different orders of summation; measured below 2e-6 everywhere but in summed decays.
TOLERANCE = 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_equals_unpacked(name: str) -> None:
    model = thd_model(name).eval()
    matrix.assert_same(matrix.run_packed(model), matrix.oracle(name)[1], tolerance=TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_equals_unpacked_in_training_with_checkpointing(name: str) -> None:
    model = thd_model(name).train()
    checkpoint(model, use_reentrant=False)
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    matrix.assert_same(matrix.run_packed(model), matrix.oracle(name)[1], tolerance=TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_changed_token_moves_no_other_sequence(name: str) -> None:
    model = thd_model(name).eval()
    (batch, _) = matrix.packs()
    changed = batch.input_ids.clone()
    first = batch.lengths[0]
    changed[:first] = (changed[:first] + 1) % 60 + 3
    with torch.no_grad():
        before = model(**batch.hf_kwargs()).logits[0]
        after = model(**batch.replace(input_ids=changed).hf_kwargs()).logits[0]
    assert not torch.equal(before[:first], after[:first])
    # Expert kernels sort the tokens of all sequences together, so that others are added up in another order.
    allowed = 1e-6 * before.abs().max().item() if FAMILIES[name].experts else 0.0
    assert (before[first:] - after[first:]).abs().max().item() <= allowed
