"""The name "thd" is known to transformers however and whenever transformers is imported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("transformers")

import torch
from torch import nn

from lightning_thd.models import prepare, register, register_family, register_thd
from lightning_thd.models.families import recurrent, registry
from tests.models.families import build
from tests.models.matrix import packs

register_thd()


def test_a_transformers_that_cannot_be_imported_leaves_the_rest_working(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register_thd.cache_clear()
    monkeypatch.setattr(register.importlib, "import_module", Mock(side_effect=ImportError("no torch")))
    register_thd()


@pytest.mark.parametrize(
    ("installed", "error", "message"),
    [
        ("5.18.4", None, "5.18.4: it is too old"),
        ("5.99.0", TypeError("no config"), r"5.99.0: its internals have changed \(no config\)"),
    ],
)
def test_another_transformers_refuses_thd_alone(
    monkeypatch: pytest.MonkeyPatch, installed: str, error: Exception | None, message: str
) -> None:
    table: dict[str, Any] = {}
    monkeypatch.setattr(register, "_installed", lambda: installed)
    install = Mock(side_effect=error)
    module: Any = SimpleNamespace(table=SimpleNamespace(register=table.__setitem__))
    register._register("table", install, module)
    assert install.called == (error is not None)
    with pytest.raises(ValueError, match=f"{message}. Install a release from 5.19 to 5.24"):
        table["thd"]()


class MyConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(32, 32, 3, groups=32, padding=2)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        mixed = self.convolution(hidden_states.transpose(1, 2))[..., : hidden_states.shape[1]]
        return mixed.transpose(1, 2)


class MyMlp(nn.Module):
    def __init__(self, convolution: MyConvolution) -> None:
        super().__init__()
        self.mixer = convolution

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.mixer(hidden_states)
        return mixed


def test_a_registered_family_runs_its_recurrent_layers_inside_the_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recurrent, "MIXERS", dict(recurrent.MIXERS))
    model: Any = build("llama", "thd").eval()
    model.model.layers[0].mlp = MyMlp(MyConvolution())
    (batch, _) = packs()

    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.mixer \(MyConvolution\).*register_family"):
        model(**batch.hf_kwargs())
    seen: list[nn.Module] = []
    register_family("llama", recurrent_layers=["MyConvolution"], adapt=seen.append)

    try:
        prepare(model)
        got = batch.unpack(model(**batch.hf_kwargs()).logits)
    finally:
        registry._REGISTERED.clear()

    assert any(inner is model for inner in seen)
    for ids, logits in zip(batch.unpack(batch.input_ids), got, strict=True):
        alone = model(input_ids=ids[None], use_cache=False).logits[0]
        torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_registered_or_prepared_is_named() -> None:
    with pytest.raises(ValueError, match="model_type=''; wanted the model_type of a config"):
        register_family("")
    with pytest.raises(TypeError, match="adapt is a str; wanted a function"):
        register_family("llama", adapt="no")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM runs attn_implementation='eager', so there is nothing"
    ):
        prepare(build("llama", "eager"))
    layer = nn.Linear(2, 2)
    assert prepare(layer) is layer


def test_a_model_is_refused_when_it_is_built_or_switched_to_thd() -> None:
    class Model:
        def get_correct_attn_implementation(self, name: str | None, later: bool = False) -> str:
            return name or "sdpa"

    def refusal() -> None:
        raise ValueError("not with this release")

    register._refuse_models(Model, refusal)
    assert Model().get_correct_attn_implementation("eager", later=True) == "eager"
    assert Model().get_correct_attn_implementation(None) == "sdpa"
    with pytest.raises(ValueError, match="not with this release"):
        Model().get_correct_attn_implementation("thd", later=True)

    register._refuse_models(object, refusal)  # without such a method, the call of a model raises
