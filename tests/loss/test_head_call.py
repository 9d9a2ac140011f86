"""The call of the model behind a loss: what the host knows reaches the layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from lightning_thd import causal_lm_loss
from lightning_thd._static import static_shapes
from lightning_thd.models.pack import Pack
from tests.models import matrix
from tests.models.families import build
from tests.tiny import checkpoint_activations


def refuse(*_: Any) -> None:
    raise AssertionError("a tensor was read back")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_state_space_layers_read_no_lengths_back(
    checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (batch, _) = build("mamba2", "thd").train(), matrix.packs()
    model(**batch.hf_kwargs())  # the first call checks the model
    if checkpointing:
        checkpoint_activations(model)
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "tolist", refuse)
        loss = causal_lm_loss(model, batch)
        loss.backward()
        with pytest.raises(AssertionError, match="read back"):  # or the patch would show nothing
            model(**batch.hf_kwargs())
    logits = model(**batch.hf_kwargs()).logits[0]
    wanted = torch.nn.functional.cross_entropy(logits, batch.targets, ignore_index=-100)
    torch.testing.assert_close(loss, wanted)


def test_a_recorded_step_is_given_no_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (batch, _) = build("bamba", "thd").train(), matrix.packs()
    wanted = causal_lm_loss(model, batch)
    monkeypatch.setattr(Pack, "from_batch", refuse)
    monkeypatch.setattr(Pack, "lengths", property(refuse))
    with static_shapes():
        torch.testing.assert_close(causal_lm_loss(model, batch), wanted)
