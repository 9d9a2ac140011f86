"""Models that cannot be cut by depth are refused by name before anything runs."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from lightning_thd.parallel.pipeline.cut import cut_model
from lightning_thd.parallel.pipeline.stage import (
    Boundary,
    NoEmbedding,
    NoHead,
    require_own_inputs,
    returned_by,
    stage_of,
)
from tests.parallel.pipeline.support import SIZES, make_model

CHANNEL: Any = SimpleNamespace(rank=0, ranks=2)
LAST: Any = SimpleNamespace(rank=1, ranks=2)


def test_a_rank_keeps_its_own_weights_under_the_names_of_the_whole() -> None:
    whole = set(make_model("llama").state_dict())
    first, last = make_model("llama"), make_model("llama")
    cut_model(first, CHANNEL)
    cut_model(last, LAST)
    assert set(first.state_dict()) | set(last.state_dict()) == whole
    assert not set(first.state_dict()) & set(last.state_dict())
    assert "lm_head.weight" in last.state_dict()
    assert "model.embed_tokens.weight" in first.state_dict()
    assert stage_of(first) is cut_model(first, CHANNEL)  # a second call finds what the first one did


def test_it_needs_no_weights() -> None:
    with torch.device("meta"):
        model = make_model("llama")
    stage = cut_model(model, CHANNEL)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert stage.layers == list(range(len(stage.layers)))


def another_config(model: Any, **values: Any) -> Any:
    for name, value in values.items():
        setattr(model.config, name, value)
    return model


def shares_a_layer() -> Any:
    model: Any = make_model("llama")
    model.model.layers[3].mlp = model.model.layers[1].mlp
    return model


def opt() -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 16}
    config = transformers.OPTConfig(num_hidden_layers=4, num_attention_heads=4, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="thd")


def with_critic() -> Any:
    model: Any = make_model("llama")
    model.critic = nn.Linear(SIZES["hidden_size"], 1)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2)), r"holds none \(looked for a module with config"),
        (
            lambda: another_config(make_model("llama"), num_hidden_layers=7),
            r"num_hidden_layers=7 decoder layers .* lists are model.layers \(5\)",
        ),
        (shares_a_layer, r"Layers 1 and 3 of LlamaForCausalLM share mlp\.gate_proj\.weight"),
        (opt, r"has \w+ \(\w+\) before its layers, wanted only embeddings"),
        (with_critic, r"parameters outside its embedding, layers, final norm and head: \['critic"),
        (
            lambda: another_config(make_model("llama"), num_kv_shared_layers=2),
            "has num_kv_shared_layers=2: its layers use keys of earlier ones",
        ),
        (
            lambda: another_config(make_model("llama"), hidden_size_per_layer_input=8),
            "has hidden_size_per_layer_input=8: .* or an embedding each",
        ),
    ],
)
def test_models_that_have_no_stages(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cut_model(make(), CHANNEL)


def test_more_stages_than_layers() -> None:
    with pytest.raises(ValueError, match="makes 6 stages, but the model has 5 layers"):
        cut_model(make_model("llama"), CHANNEL, stages_per_rank=3)


def test_a_balancing_loss_of_another_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as home

    model: Any = make_model("qwen3_moe")
    model.config.output_router_logits = True
    theirs = home.load_balancing_loss_func
    monkeypatch.setattr(home, "load_balancing_loss_func", lambda *args: 2 * theirs(*args))
    message = "has output_router_logits=True: its balancing loss .* its formula is not known"
    with pytest.raises(ValueError, match=message):
        cut_model(model, CHANNEL)
    monkeypatch.setattr(home, "load_balancing_loss_func", lambda logits: 0)
    with pytest.raises(ValueError, match=message):
        cut_model(model, CHANNEL)


def test_the_stand_in_for_an_embedding_has_the_device_of_its_stage() -> None:
    channel = SimpleNamespace(dtype=lambda device: torch.float64)
    stage: Any = SimpleNamespace(held={"1": nn.Linear(2, 2)}, channel=channel)
    absent = NoEmbedding(nn.Embedding(8, 6), stage)
    assert absent.weight.device == torch.device("cpu")
    for given in (torch.zeros(1, 4, dtype=torch.int64), torch.Size((1, 4))):  # positions may get a shape
        found = absent(given)
        assert found.shape == (1, 4, 6)
        assert found.dtype == torch.float64
        assert found.isnan().all()


@pytest.mark.parametrize(
    "value", [torch.full((1, 4, 2), torch.nan), torch.zeros(1, 4, 2, requires_grad=True)]
)
def test_layers_that_are_given_what_the_embedding_made(value: torch.Tensor) -> None:
    require_own_inputs(3, {"rope": (value.detach().nan_to_num(),)})
    with pytest.raises(ValueError, match="Layer 3 is given 'residual', which is made of the embedding"):
        require_own_inputs(3, {"residual": value})


def test_logits_of_a_stage_without_a_head() -> None:
    with pytest.raises(ValueError, match="Only the last pipeline stage has logits"):
        NoHead(64, CHANNEL)(torch.zeros(1, 4, 8))


class Pairs(nn.Linear):
    """A layer that returns its hidden states and something else."""

    more: Any = None

    def forward(self, hidden: torch.Tensor) -> Any:
        return super().forward(hidden), self.more


class Outputs(nn.Linear):
    """A layer whose source does not say how much it returns."""

    def forward(self, hidden: torch.Tensor) -> Any:
        return tuple(iter((hidden,)))


@pytest.mark.parametrize(
    ("family", "wanted"), [("llama.LlamaDecoderLayer", None), ("bamba.BambaDecoderLayer", 2)]
)
def test_what_layers_return_is_read_from_their_source(family: str, wanted: int | None) -> None:
    module, _, name = family.partition(".")
    models = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    layer = getattr(models, name)
    assert returned_by(layer.__new__(layer)) == wanted


def test_a_boundary_returns_what_its_layer_does() -> None:
    stage: Any = SimpleNamespace(draws=False, cross=lambda index, hidden: hidden)
    hidden, layer = torch.zeros(1, 4, 2), Pairs(2, 2)
    boundary = Boundary(layer, 0, stage)
    assert boundary(hidden) == (hidden, None)
    boundary.require_same_form(layer, (), layer(hidden))
    layer.more = hidden
    with pytest.raises(ValueError, match="returns a tuple of Tensor, Tensor; wanted only the hidden states"):
        boundary.require_same_form(layer, (), layer(hidden))
    unknown = Outputs(2, 2)
    with pytest.raises(ValueError, match="Outputs returns a tuple of Tensor; wanted only the hidden states"):
        Boundary(unknown, 0, stage).require_same_form(unknown, (), unknown(hidden))
