"""Weights drawn by name or read from a folder: a part of a model gets the values of the whole one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from lightning_thd.models.weights import draw_weights, postponed_reading, read_weights, require_unchanged
from lightning_thd.parallel.pipeline.cut import cut_model
from tests.strategies.jobs import family_model

CPU = torch.device("cpu")
SLOW = ["llama@4", "lfm2@4", "gemma3@4t", "bamba@4", "qwen3_next@4"]
FAMILIES = ["qwen3@4t", "qwen3_moe@4", "gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
# PEFT asks transformers for a property under its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers under all of their names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(model.named_buffers(remove_duplicate=False))}


def on_meta(family: str) -> nn.Module:
    with torch.device("meta"):
        return family_model(family)


def stage(model: nn.Module, rank: int) -> nn.Module:
    channel: Any = SimpleNamespace(rank=rank, ranks=2)
    cut_model(model, channel)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_draws_what_the_whole_model_draws(family: str) -> None:
    whole = on_meta(family)
    host = family_model(family)
    before = torch.get_rng_state()
    draw_weights(whole, CPU, seed=1)

    assert torch.equal(torch.get_rng_state(), before)
    expected = tensors(whole)
    for name, value in host.named_buffers():  # no checkpoint holds the frequencies of a rope
        assert torch.equal(value, expected[name]), name

    for name, value in host.named_parameters():  # other numbers of the same distribution
        spread = float(value.detach().std()) if value.numel() > 1_000 else 0.0
        assert float(expected[name].detach().std()) == pytest.approx(spread, rel=0.2) or not spread, name

    seen = 0
    for rank in range(2):
        part = stage(on_meta(family), rank)
        draw_weights(part, CPU, seed=1)
        for name, value in tensors(part).items():
            tied = rank == 1 and part.config.tie_word_embeddings and "head" in name  # type: ignore[union-attr]
            assert tied or torch.equal(value, expected[name]), name  # the first stage sends its tied weight
            seen += isinstance(value, nn.Parameter)

    assert seen >= len(list(whole.parameters()))
    other = on_meta(family)
    draw_weights(other, CPU, seed=2)

    assert any(not torch.equal(value, expected[name]) for name, value in other.named_parameters())


def load(folder: Path, **kwargs: Any) -> Any:
    with postponed_reading():
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="thd", dtype=torch.float64, **kwargs
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_reads_what_the_folder_holds(tmp_path: Path, family: str) -> None:
    saved: Any = family_model(family)
    saved.save_pretrained(tmp_path, max_shard_size="40KB")
    expected = tensors(saved)
    for rank in range(2):
        part = load(tmp_path)
        assert all(parameter.is_meta for parameter in part.parameters())
        for name, parameter in part.named_parameters():
            parameter.requires_grad_(".3." not in name)
        read_weights(stage(part, rank))
        assert not any(parameter.is_meta for parameter in part.parameters())
        draw_weights(part, CPU, seed=1)
        for name, value in tensors(part).items():
            assert torch.equal(value, expected[name]), name
            assert value.requires_grad == (".3." not in name and isinstance(expected[name], nn.Parameter))


def test_wrapped_models_are_read_and_their_adapters_drawn(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    saved: Any = family_model("qwen3@4")
    saved.save_pretrained(tmp_path)
    how = peft.LoraConfig(r=4, target_modules=["q_proj"])
    model = peft.get_peft_model(load(tmp_path), how, autocast_adapter_dtype=False)
    read_weights(model)
    draw_weights(model, CPU, seed=1)

    for name, value in model.named_parameters():
        if "lora_A" in name:
            assert float(value.detach().std()) > 0.01
        elif "lora_B" in name:
            assert not value.any()
        else:
            plain = name.removeprefix("base_model.model.").replace("base_layer.", "")
            assert torch.equal(value, tensors(saved)[plain])


def test_adapters_that_are_made_of_weights() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(on_meta("qwen3@4"), peft.LoraConfig(target_modules=["q_proj"]))
    model.peft_config["default"].init_lora_weights = "pissa"
    with pytest.raises(ValueError, match=r"init_lora_weights=\['pissa'\]. Only LoRA's"):
        draw_weights(model, CPU, seed=1)
    model = peft.get_peft_model(
        on_meta("qwen3@4"), peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    )
    with pytest.raises(ValueError, match=r"adapters of .*k_proj \(Linear\) on the meta device"):
        draw_weights(model, CPU, seed=1)


def test_what_nobody_gives_values_is_named() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.register_buffer("steps", torch.zeros(1, dtype=torch.long))
            self.register_buffer("mask", torch.ones(2, 2, dtype=torch.bool).tril())

    class Replaced(Gate):
        def reset_parameters(self) -> None:
            self.scale = nn.Parameter(torch.ones(3))
            self.steps = torch.ones(1, dtype=torch.long)
            self.mask = torch.ones(2, 2, dtype=torch.bool).tril()

    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), Gate(), Replaced())
    message = r"Sequential holds \['1.scale', '1.steps', '1.mask'\] on the meta device"
    with pytest.raises(ValueError, match=message):
        draw_weights(module, CPU, seed=1)


def test_what_has_values_is_left_alone() -> None:
    model: Any = family_model("qwen3@4")
    before = {name: value.detach().clone() for name, value in tensors(model).items()}
    with torch.device("meta"):
        model.model.norm = type(model.model.norm)(64)
    draw_weights(model, CPU, seed=1)
    for name, value in tensors(model).items():
        assert name == "model.norm.weight" or torch.equal(value, before[name])
    assert torch.equal(model.model.norm.weight, torch.ones(64))


def test_a_folder_that_lacks_a_tensor_or_has_another_shape(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved: Any = family_model("qwen3@4")
    saved.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    norm = state.pop("model.norm.weight")
    save_file(state, file, metadata={"format": "pt"})
    model = load(tmp_path)
    with pytest.warns(UserWarning, match=r"Qwen3ForCausalLM lacks \['model.norm.weight'\], which get random"):
        read_weights(model)
    draw_weights(model, CPU, seed=1)
    assert torch.equal(model.model.norm.weight, torch.ones_like(norm))
    save_file({**state, "model.norm.weight": norm[:5].clone()}, file, metadata={"format": "pt"})
    model = load(tmp_path)
    with pytest.raises(ValueError, match="holds tensors that do not fit the model: .*model.norm.weight"):
        read_weights(model)


def test_changes_behind_from_pretrained_are_refused(tmp_path: Path) -> None:
    saved: Any = family_model("qwen3@4t")
    saved.save_pretrained(tmp_path)
    model = load(tmp_path)
    model.double().train().requires_grad_(False)
    require_unchanged(model)
    nn.init.zeros_(model.model.norm.weight)
    message = (
        r"\['model.norm.weight'\] of Qwen3ForCausalLM changed after from_pretrained, which reads weights"
    )

    with pytest.raises(ValueError, match=message):
        require_unchanged(model)
    model = load(tmp_path)
    model.resize_token_embeddings(72, mean_resizing=False)

    with pytest.raises(ValueError, match=r"model.embed_tokens.weight'.* changed after from_pretrained"):
        require_unchanged(model)
    model = load(tmp_path)
    del model.model.layers[2:]
    require_unchanged(model)
