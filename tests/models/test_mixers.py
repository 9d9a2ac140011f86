"""State-space layers: which are known, how fused kernels are called, and what is refused."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from lightning_thd.batch import THDBatch
from lightning_thd.models import mixers, packed, register_thd
from lightning_thd.models.mixers import MIXERS, adopt_mixers
from lightning_thd.models.pack import Pack, Scope, scoped
from lightning_thd.models.refusals import refuse_unknown_layers
from tests.models import matrix
from tests.models.families import build

register_thd()


class Mamba2Mixer(nn.Module):
    """Stands for the layer of transformers with its fused kernels installed: it records what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[dict[str, Any]] = []

    def forward(self, hidden_states: Tensor, cache_params: Any = None, **kwargs: Any) -> Tensor:
        self.told.append(kwargs)
        return hidden_states.cumsum(1)


def announced(batch: THDBatch) -> AbstractContextManager[None]:
    """What a model with "thd" does around its layers."""
    return scoped(Scope(Pack.from_batch(batch), None, module=nn.Identity()))


adopt_mixers(Mamba2Mixer)  # searches the module it comes from, this one


def test_the_classes_of_this_module_are_adopted_once() -> None:
    forward = Mamba2Mixer.forward
    assert forward._thd_mixer
    adopt_mixers(Mamba2Mixer)
    assert Mamba2Mixer.forward is forward
    assert sys.modules[__name__].Mamba2Mixer is Mamba2Mixer


def test_outside_a_pack_nothing_changes() -> None:
    layer, x = Mamba2Mixer(), torch.randn(2, 5, 3)
    assert torch.equal(layer(x, seq_idx=None), x.cumsum(1))
    assert layer.told == [{"seq_idx": None}]


def test_a_pack_that_no_model_announced_is_none_of_its_business() -> None:
    layer, (batch, _) = Mamba2Mixer(), matrix.packs()
    x = torch.randn(1, 35, 3)
    with packed(batch):
        assert torch.equal(layer(x), x.cumsum(1))


def test_without_kernels_the_layer_runs_on_groups() -> None:
    layer, (batch, _) = Mamba2Mixer(), matrix.packs()
    x = torch.randn(1, 35, 3)
    with announced(batch):
        out = layer(x, cu_seq_lens_q=batch.cu_seqlens, max_length_q=16)
    want = torch.cat([part.cumsum(1) for part in x.split(batch.lengths, 1)], 1)
    torch.testing.assert_close(out, want)
    assert layer.told == [{}]  # one group, and no boundaries that a layer of rows would trip over


def test_with_kernels_the_layer_is_told_the_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, (batch, _) = Mamba2Mixer(), matrix.packs()
    monkeypatch.setattr(mixers, "can_run", lambda kernels, tokens: kernels == mixers._SSD)
    with announced(batch):
        for _ in range(2):
            layer(torch.randn(1, 35, 3))
    first, second = layer.told
    assert first["seq_idx"].dtype == torch.int32
    assert first["seq_idx"].tolist() == [[0] * 7 + [1] + [2] * 16 + [3] * 3 + [4] * 8]
    assert first["seq_idx"] is second["seq_idx"]  # worked out once a batch
    assert first["cu_seq_lens_q"] is batch.cu_seqlens_padded


def test_kernels_are_not_used_on_a_cpu() -> None:
    assert not mixers.can_run(mixers._SSD, torch.zeros(1))
    assert not mixers.can_run(None, torch.zeros(1))


@pytest.mark.parametrize("name", ["cache_params", "attention_mask"])
def test_a_cache_or_mask_beside_a_pack_is_refused(name: str) -> None:
    (batch, _) = matrix.packs()
    with announced(batch), pytest.raises(ValueError, match=rf"Mamba2Mixer got a pack and {name}"):
        Mamba2Mixer()(torch.randn(1, 35, 3), **{name: object()})


def test_rows_of_another_length_are_refused() -> None:
    (batch, _) = matrix.packs()
    with announced(batch), pytest.raises(ValueError, match=r"got \(1, 9, 3\) while .* pack of 35 slots"):
        Mamba2Mixer()(torch.randn(1, 9, 3))


def test_every_known_layer_of_transformers_is_found_by_its_name() -> None:
    for name in ("mamba", "bamba", "qwen3_next", "lfm2", "recurrent_gemma", "minimax"):
        model = build(name, "thd")
        refuse_unknown_layers(model)
        adopted = {type(m).__name__ for m in model.modules() if hasattr(type(m).forward, "_thd_mixer")}
        assert len(adopted & MIXERS.keys()) == 1
