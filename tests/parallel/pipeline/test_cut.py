"""Models that cannot be cut by depth are refused by name before anything runs."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.parallel.pipeline.channel import Channel
from lightning_thd.parallel.pipeline.cut import cut_model
from lightning_thd.parallel.pipeline.stage import require_own_inputs, stage_of
from tests.parallel.pipeline.support import SIZES, make_model
from tests.ranks import pretended_ranks

CHANNEL: Any = SimpleNamespace(rank=0, ranks=2)
LAST: Any = SimpleNamespace(rank=1, ranks=2)


def test_a_rank_keeps_its_own_weights_under_the_names_of_the_whole() -> None:
    whole = set(make_model("llama").state_dict())
    first = make_model("llama")
    last = make_model("llama")
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
            "has num_kv_shared_layers=2: its layers use keys of earlier layers",
        ),
        (
            lambda: another_config(make_model("llama"), hidden_size_per_layer_input=8),
            "has hidden_size_per_layer_input=8: its layers use embeddings from",
        ),
    ],
)
def test_models_that_have_no_stages(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cut_model(make(), CHANNEL)


def test_a_balancing_loss_of_another_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as home

    model: Any = make_model("qwen3_moe")
    model.config.output_router_logits = True
    theirs = home.load_balancing_loss_func
    monkeypatch.setattr(home, "load_balancing_loss_func", lambda *args: 2 * theirs(*args))
    message = "has output_router_logits=True: its balancing loss .* the formula of that loss is not known"
    with pytest.raises(ValueError, match=message):
        cut_model(model, CHANNEL)
    monkeypatch.setattr(home, "load_balancing_loss_func", lambda logits: 0)
    with pytest.raises(ValueError, match=message):
        cut_model(model, CHANNEL)


@pytest.mark.parametrize(
    "value", [torch.full((1, 4, 2), torch.nan), torch.zeros(1, 4, 2, requires_grad=True)]
)
def test_layers_that_are_given_what_the_embedding_made(value: torch.Tensor) -> None:
    require_own_inputs(3, {"rope": (value.detach().nan_to_num(),)})
    with pytest.raises(ValueError, match="Layer 3 is given 'residual', which is computed from the embedding"):
        require_own_inputs(3, {"residual": value})


@pytest.mark.parametrize("length", [0, 2])
def test_boundaries_return_what_layers_return(length: int) -> None:
    model: Any = make_model("llama")
    channel: Any = SimpleNamespace(rank=1, ranks=2, tuple_length=length)
    cut_model(model, channel).begin(0)
    hidden = torch.ones(1, 3, SIZES["hidden_size"])
    returned = model.model.layers[0](hidden)
    if length:
        assert returned == (hidden, None)
    else:
        assert returned is hidden


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ((None,), (), "returns a tensor, but the first layer returns a tuple of 2"),
        ((), (None, None), "returns a tuple of 3, but the first layer returns a tensor"),
        ((), (torch.ones(1),), "returns a tuple of Tensor, Tensor; wanted only the hidden states"),
    ],
)
def test_layers_that_return_more_or_in_two_forms(first: Any, second: Any, message: str) -> None:
    model: Any = make_model("llama")
    channel: Any = SimpleNamespace(rank=0, ranks=2, tuple_length=None)
    cut_model(model, channel).begin(0)
    layers = list(model.model.layers)
    for layer, others in zip(layers, (first, second), strict=False):
        layer.forward = lambda x, others=others: (x, *others) if others else x
    layers[0](torch.ones(1, 3, SIZES["hidden_size"]))
    with pytest.raises(ValueError, match=message):
        layers[1](torch.ones(1, 3, SIZES["hidden_size"]))


def test_a_norm_that_runs_before_the_layers_and_was_registered_behind() -> None:
    sizes = {
        "d_model": 16,
        "decoder_layers": 2,
        "encoder_layers": 2,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 32,
    }
    config = transformers.BartConfig(is_decoder=True, is_encoder_decoder=False, vocab_size=64, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="thd")
    model.model.decoder.embed_positions = Nowhere()

    for rank in range(2):
        channel: Any = SimpleNamespace(rank=rank, ranks=2, dtype=lambda device: torch.float32)
        of_rank = copy.deepcopy(model)
        cut_model(of_rank, channel).begin(0)
        with pytest.raises(ValueError, match="BartDecoder runs layernorm_embedding before its layers"):
            causal_lm_loss(of_rank, THDBatch.collate([{"input_ids": [1, 2, 3]}]))


class Nowhere(nn.Module):
    """Stands for BART's positions, which packs refuse."""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(1)


def test_stages_of_two_precisions() -> None:
    with pretended_ranks(2):
        channel = Channel(down=dist.group.WORLD, up=dist.group.WORLD)
        channel.send(torch.ones(2), "down")
        with pytest.raises(ValueError, match="in torch.bfloat16, but the first stage ended in torch.float32"):
            channel.send(torch.ones(2, dtype=torch.bfloat16), "down")
