"""MLPs and experts in tiles of tokens: the same loss and gradients as in one call, and less memory."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.models import prepare
from lightning_thd.models.tiles import tile_of
from tests.models.families import FAMILIES, build, build_in_double
from tests.tiny import largest_error, sequences, tiny_llama

BATCH = THDBatch.collate(sequences(9, labels=True))
TILE = 16  # cuts the pack into several tiles, which do not divide it
DENSE = ("llama", "gpt2", "phi3", "gemma3")
# What newer releases of transformers say.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
EXPERTS = ("qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")


def loss_and_gradients(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    torch.manual_seed(1)
    loss = causal_lm_loss(model, BATCH)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("family", [*DENSE, *EXPERTS])
@pytest.mark.filterwarnings("ignore:.*RoPE scaling factor")
def test_tiles_give_the_loss_and_gradients_of_one_call(family: str, checkpointed: bool) -> None:
    whole = build_in_double(family)
    tiled = copy.deepcopy(whole)
    if checkpointed:
        tiled.gradient_checkpointing_enable()  # type: ignore[operator]

    prepare(tiled, mlp_tile=TILE)

    assert BATCH.input_ids.shape[-1] % TILE
    expected, gradients = loss_and_gradients(whole)
    loss, actual = loss_and_gradients(tiled)
    assert torch.equal(loss, expected)
    assert actual.keys() == gradients.keys()
    assert largest_error(actual, gradients) < 1e-12


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_sums_in_fp32_round_in_another_order(family: str) -> None:
    whole = build(family, "thd").train()
    tiled = prepare(copy.deepcopy(whole), mlp_tile=TILE)
    expected, gradients = loss_and_gradients(whole)
    loss, actual = loss_and_gradients(tiled)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert largest_error(actual, gradients) < 1e-6


@pytest.mark.parametrize("family", [name for name in FAMILIES if FAMILIES[name].experts])
def test_experts_run_in_tiles_and_routers_do_not(family: str) -> None:
    model = prepare(build(family, "thd"), mlp_tile=TILE)
    tiled = [type(child).__name__ for child in model.modules() if "_thd_mlp_tile" in child.__dict__]
    assert any(name.endswith(("Experts", "NaiveMoe")) for name in tiled)
    assert not any("Router" in name or name.endswith(("Block", "MoE")) for name in tiled)


def test_an_evaluation_keeps_nothing_and_gives_the_same_logits() -> None:
    whole = tiny_llama()
    tiled = prepare(copy.deepcopy(whole), mlp_tile=TILE)
    with torch.no_grad():
        expected, logits = (model(**BATCH.hf_kwargs()).logits for model in (whole, tiled))
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)


def test_dropout_inside_an_mlp_is_drawn_again_for_its_tile() -> None:
    # The gradient of the summed output for one weight, by finite differences on the same random numbers.
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
    config = GPT2Config(**sizes, resid_pdrop=0.3, attn_pdrop=0.0)
    model: Any = GPT2LMHeadModel._from_config(config, attn_implementation="thd").double().train()
    prepare(model, mlp_tile=TILE)
    weight = model.transformer.h[0].mlp.c_fc.weight
    _, gradients = loss_and_gradients(model)
    expected = gradients["transformer.h.0.mlp.c_fc.weight"][0, 0]

    values = []
    for shift in (1e-5, -2e-5):
        with torch.no_grad():
            weight[0, 0] += shift
        values.append(loss_and_gradients(model)[0])
    torch.testing.assert_close((values[0] - values[1]) / 2e-5, expected, rtol=1e-5, atol=1e-9)


def kept_bytes(model: nn.Module) -> int:
    """Return the bytes that the forward pass keeps for the backward pass, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def see(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        loss = causal_lm_loss(model, BATCH)
    assert loss.requires_grad
    return sum(kept.values())


def test_an_mlp_keeps_its_input_only() -> None:
    hidden = 32
    inner = 128
    layers = 2
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=4,
        vocab_size=64,
    )
    whole = LlamaForCausalLM._from_config(config, attn_implementation="thd")
    tiled = prepare(copy.deepcopy(whole), mlp_tile=TILE)
    slots = BATCH.input_ids.shape[-1]
    # SiLU's input and output, the second factor and the product: four tensors of the intermediate size.
    saved = kept_bytes(whole) - kept_bytes(tiled)

    assert saved == pytest.approx(layers * slots * 4 * inner * 4, rel=0.02)


def test_later_calls_keep_the_tile() -> None:
    model = prepare(tiny_llama(), mlp_tile=TILE)
    assert tile_of(prepare(model)) == TILE
    assert tile_of(prepare(model, mlp_tile=TILE)) == TILE
    assert tile_of(pickle.loads(pickle.dumps(model))) == TILE
    with pytest.raises(ValueError, match=r"mlp_tile=32, but LlamaForCausalLM already .* tiles of 16 tokens"):
        prepare(model, mlp_tile=32)


def test_a_layer_put_in_later_runs_in_tiles_too() -> None:
    model: Any = prepare(tiny_llama(), mlp_tile=TILE)
    other: Any = tiny_llama()
    model.model.layers[1] = other.model.layers[1]
    assert tile_of(model.model.layers[1]) is None
    prepare(model)
    assert tile_of(model.model.layers[1]) == TILE


@pytest.mark.parametrize(("tile", "wanted"), [(0, "wanted 1 or more"), (-8, "wanted 1 or more")])
def test_a_tile_holds_at_least_one_token(tile: int, wanted: str) -> None:
    with pytest.raises(ValueError, match=rf"mlp_tile={tile}; {wanted}. Pass the tokens of a tile: 2_048"):
        prepare(tiny_llama(), mlp_tile=tile)


def test_a_tile_is_a_whole_number() -> None:
    with pytest.raises(TypeError, match="mlp_tile is a float, 0.5; wanted a whole number"):
        prepare(tiny_llama(), mlp_tile=0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["opt", "mamba"])
def test_a_model_without_mlps_is_refused(family: str) -> None:
    with pytest.raises(ValueError, match=r"mlp_tile=16 .* cannot: it has no such module. Leave mlp_tile out"):
        prepare(build(family, "thd"), mlp_tile=TILE)


def test_a_feed_forward_layer_that_reads_the_token_before_is_refused() -> None:
    """RWKV's was cut into tiles, and refused them in the first step, without a word of mlp_tile."""
    config = RwkvConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64)
    model = RwkvForCausalLM._from_config(config, attn_implementation="thd")
    with pytest.raises(ValueError, match=r"RwkvForCausalLM cannot: it has no such module. Leave"):
        prepare(model, mlp_tile=TILE)


@pytest.mark.parametrize("option", ["mlp_tile=16", "offload=True"])
def test_a_module_without_a_transformers_model_is_refused(option: str) -> None:
    """A LightningModule before configure_model is one: the option would be lost without a word."""
    name, value = option.split("=")
    with pytest.raises(ValueError, match=f"{option} is for .* but Linear holds none. Pass the model after"):
        prepare(nn.Linear(2, 2), **{name: int(value) if value.isdigit() else True})


def test_experts_that_get_no_choices_are_refused() -> None:
    config = Llama4TextConfig(
        hidden_size=32,
        intermediate_size=16,
        intermediate_size_mlp=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=64,
        num_local_experts=2,
    )
    model = Llama4ForCausalLM._from_config(config, attn_implementation="thd")
    with pytest.raises(ValueError, match="experts in .* take no list of chosen experts"):
        prepare(model, mlp_tile=TILE)


def test_a_replaced_forward_is_refused() -> None:
    model: Any = tiny_llama()
    block = model.model.layers[0].mlp
    block.forward = block.forward
    with pytest.raises(ValueError, match=r"layers.0.mlp \(LlamaMLP\) was replaced"):
        prepare(model, mlp_tile=TILE)


@pytest.mark.parametrize("offload", [1, "cpu"])
def test_offload_is_true_or_false(offload: Any) -> None:
    with pytest.raises(TypeError, match="offload is a .*wanted bool"):
        prepare(tiny_llama(), offload=offload)
