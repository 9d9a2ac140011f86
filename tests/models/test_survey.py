"""Models that would be wrong without anybody noticing are refused, by the name of the layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from lightning_thd.models import register_thd
from lightning_thd.models.refusals import refuse_early_release, refuse_unknown_layers
from tests.models import matrix
from tests.models.families import FAMILIES, build

register_thd()


def test_an_unknown_layer_with_a_state_is_refused_by_name() -> None:
    model, (batch, _) = build("llama", "thd"), matrix.packs()
    layer: Any = model.get_submodule("model.layers.1")
    layer.memory = nn.Sequential(nn.Conv1d(32, 32, 4, groups=32))
    with pytest.raises(
        ValueError, match=r"model\.layers\.1\.memory \(Sequential\) mixes tokens .*check_packing"
    ):
        model(**batch.hf_kwargs())


class RowPositionEmbedding(nn.Module):
    """Counts along the row, and is told nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[1])[:, None] * x


def test_positions_counted_inside_the_model_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = build("llama", "thd")
    model.model.embed_positions = RowPositionEmbedding()
    forward = type(model.model).forward

    def without_positions(self: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        return forward(self, input_ids, **kwargs)

    monkeypatch.setattr(type(model.model), "forward", without_positions)
    with pytest.raises(
        ValueError, match=r"embed_positions \(RowPosition\w+\) counts positions .* LlamaModel takes no"
    ):
        model(**matrix.packs()[0].hf_kwargs())


def test_a_model_without_any_layer_that_knows_packs_is_refused() -> None:
    model: Any = build("llama", "thd")
    model.model = nn.Identity()
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no layer that knows about packs"):
        refuse_unknown_layers(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_of_the_table_is_refused(name: str) -> None:
    refuse_unknown_layers(build(name, "thd"))


def test_a_tower_with_a_config_of_its_own_is_none_of_its_business() -> None:
    model: Any = build("llama", "thd")
    tower = build("gpt2", "thd")
    tower.convolution = nn.Sequential(nn.Conv1d(4, 4, 3))
    model.model.tower = tower
    refuse_unknown_layers(model)
    model.model.convolution = nn.Sequential(nn.Conv1d(4, 4, 3))
    with pytest.raises(ValueError, match=r"model\.convolution \(Sequential\)"):
        refuse_unknown_layers(model)


def test_no_family_is_left_out_with_a_recent_transformers() -> None:
    """Families that the installed transformers lacks are dropped from the table, which must not hide any."""
    import transformers
    from packaging.version import Version

    assert len(FAMILIES) >= 40
    if Version(transformers.__version__) >= Version("5.23"):
        assert {"kimi_linear", "lfm3"} <= set(FAMILIES)


def test_families_that_an_early_release_computes_otherwise() -> None:
    with pytest.raises(
        ValueError, match=r"moshi differs between a pack .* transformers 5.15.0; it is exact from 5.23"
    ):
        refuse_early_release("moshi", "5.15.0")
    refuse_early_release("moshi", "5.23.0")
    refuse_early_release("llama", "5.15.0")
