"""Training factors against torch's counter: forward and backward on the meta device, to the last FLOP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from lightning_thd.flops import FlopsModel, SeqStats
from tests.flops.families import counted, encoder, meta_model, small_config, vision_config

TOTAL = 32
ALL_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Change = Callable[[nn.Module], None]


class Adapted(nn.Module):
    """A linear layer with a low-rank pair beside it, laid out as PEFT does."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base_layer = base
        down = nn.Linear(base.in_features, rank, bias=False, device="meta")
        up = nn.Linear(rank, base.out_features, bias=False, device="meta")
        self.lora_A = nn.ModuleDict({"default": down})
        self.lora_B = nn.ModuleDict({"default": up})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def nothing(model: nn.Module) -> None:
    """Train everything."""


def train_only(model: nn.Module, keys: Sequence[str]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(key in name for key in keys))
    assert any(parameter.requires_grad for parameter in model.parameters())


def add_lora(model: nn.Module, targets: Sequence[str]) -> None:
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in targets:
                assert isinstance(child, nn.Linear)
                setattr(parent, name, Adapted(child))


def checkpoint(model: nn.Module, *, reentrant: bool = False, every_n_layers: int = 1) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None)  # its name since transformers 5.23
    settings: dict[str, int] = {"every_n_layers": every_n_layers} if enable else {}
    enable = enable or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant}, **settings)


CHANGES: dict[str, Change] = {
    "everything": nothing,
    "frozen_embedding": partial(train_only, keys=["layers.", ".h."]),
    "one_layer": partial(train_only, keys=["layers.2.", ".h.2."]),
    "one_mlp": partial(train_only, keys=["layers.2.mlp", ".h.2.mlp"]),
    "one_norm": partial(train_only, keys=["layers.2.post_attention_layernorm", ".h.2.ln_1"]),
    "last_layers": partial(
        train_only, keys=["layers.2.", "layers.3.", ".h.2.", ".h.3.", "model.norm", "ln_f"]
    ),
}
_SLOW = ("mixtral", "gpt2", "olmo2", "qwen3", "gemma", "phi3", "qwen2_moe", "glm4_moe")
_CHECKPOINTED = ("ernie4_5_moe", "glm4", "seed_oss", "gpt_neox", "falcon")
FAMILIES = ("llama", "deepseek_v3", *(pytest.param(family, marks=pytest.mark.slow) for family in _SLOW))


def ours(model: nn.Module, family: str) -> tuple[int, str]:
    flops = FlopsModel.from_config(small_config(family), causal="full", router=True).for_module(model)
    return flops.training_flops(SeqStats.from_lengths([TOTAL])).hardware, flops.recompute


def torchs(model: nn.Module) -> int:
    return sum(counted(model, TOTAL, backward=True).values())


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_weights(family: str, change: str) -> None:
    model = meta_model(small_config(family))
    CHANGES[change](model)
    assert ours(model, family) == (torchs(model), "none")


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text", "gemma4_unified_text"])
@pytest.mark.parametrize(
    "change",
    ["everything", *(pytest.param(change, marks=pytest.mark.slow) for change in ("one_layer", "lora"))],
)
def test_layers_that_share_keys_and_streams(family: str, change: str) -> None:
    """Exact where all is trained; layers share keys with others, so what a frozen one costs is near."""
    config = small_config(family)
    config.sliding_window = TOTAL  # whole squares, as torch counts them
    model = meta_model(config)
    {**CHANGES, "lora": partial(add_lora, targets=ALL_PROJECTIONS)}[change](model)
    flops = FlopsModel.from_config(config, causal="full", router=True).for_module(model)
    flops_of_step = flops.training_flops(SeqStats.from_lengths([TOTAL], windows=flops.windows)).hardware
    exact = change == "everything" or family == "gemma4_unified_text"
    assert flops_of_step == pytest.approx(torchs(model), rel=0 if exact else 0.03)


_ENCODER_PARTS = {  # in and out of the MLP, and out of attention
    "bert": ("intermediate.dense", ".output.dense", "attention.output.dense"),
    "modernbert": ("mlp.Wi", "mlp.Wo", "attn.Wo"),
    "distilbert": ("lin1", "lin2", "out_lin"),
    "eurobert": ("up_proj", "down_proj", "o_proj"),
}


@pytest.mark.parametrize("family", _ENCODER_PARTS)
def test_frozen_weights_of_encoders(family: str) -> None:
    for part in (*_ENCODER_PARTS[family], ""):
        config, model = encoder(family)
        for name, parameter in model.named_parameters():
            first = "embed" in name or ".0." in name  # all behind it are trained where no part is named
            parameter.requires_grad_(part in name if part else not first)
        flops = FlopsModel.from_config(config).for_module(model)
        stats = SeqStats.from_lengths([TOTAL], windows=flops.windows)
        assert flops.training_flops(stats).model == torchs(model), part


def reentrant_lora(model: Any) -> None:
    """The backward runs through every layer."""
    add_lora(model, ("o_proj",))
    checkpoint(model, reentrant=True)
    model.enable_input_require_grads()


def wrap_layers(model: nn.Module, kinds: str = "LlamaDecoderLayer", **options: Any) -> None:
    """Checkpoint layers, or parts of them, as torch does it, by modules around them."""
    wrap = partial(checkpoint_wrapper, **options)
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrap, check_fn=lambda child: type(child).__name__ in kinds.split()
    )


def both(*changes: Change) -> Change:
    return lambda model: [change(model) for change in changes] and None


_QKV = ("q_proj", "k_proj", "v_proj")
# family, change, and the policy of recomputation that is seen
CASES: dict[str, tuple[str, Change, str]] = {
    "only the head": ("deepseek_v3", partial(train_only, keys=["lm_head"]), "none"),
    "adapters": ("llama", partial(add_lora, targets=_QKV), "none"),
    "checkpointed adapters": (
        "llama", both(partial(add_lora, targets=ALL_PROJECTIONS), checkpoint), "early_stop"
    ),
    "adapters and reentrant checkpointing": ("llama", reentrant_lora, "full"),
    "layers below the first trained one": ("llama", both(CHANGES["last_layers"], checkpoint), "early_stop"),
    "every third layer": ("llama", partial(checkpoint, every_n_layers=3), "early_stop"),
    "dropout behind the last product": ("biogpt", checkpoint, "early_stop"),
    # Phi-4 multimodal keeps its image tower's layers among the embeddings.
    "a tower beside the decoder": (
        "phi4_multimodal", partial(train_only, keys=["model.layers.1.self_attn.qkv"]), "none"
    ),
    "torch's wrapper": ("llama", wrap_layers, "early_stop"),
    "the reentrant one": ("llama", partial(wrap_layers, checkpoint_impl=CheckpointImpl.REENTRANT), "full"),
    "only attention": ("llama", partial(wrap_layers, kinds="LlamaAttention"), "early_stop"),
    "only MLPs": ("llama", partial(wrap_layers, kinds="LlamaMLP"), "early_stop"),
    "both": ("llama", partial(wrap_layers, kinds="LlamaAttention LlamaMLP"), "early_stop"),
    "without an early stop": ("llama", partial(wrap_layers, early_stop=False), "full"),
    # from_pretrained returns this mode, which Lightning keeps; transformers then checkpoints nothing.
    "evaluation mode": ("llama", both(checkpoint, nn.Module.eval), "none"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_single_cases(case: str) -> None:
    family, change, policy = CASES[case]
    model = meta_model(small_config(family)).train()
    change(model)
    assert ours(model, family) == (torchs(model), policy)


# What PEFT makes transformers say.
_OLD_NAME = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


def _peft(model: nn.Module, **options: object) -> nn.Module:
    peft = pytest.importorskip("peft")
    settings = {"target_modules": list(ALL_PROJECTIONS), "r": 3, **options}
    adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    return adapted.to("meta")


@_OLD_NAME
def test_what_a_trained_copy_replaces_costs_nothing() -> None:
    for copied in (["lm_head", "embed_tokens"], ["norm", "down_proj"]):
        targets = [name for name in ALL_PROJECTIONS if name not in copied]
        model = _peft(meta_model(small_config("llama")), target_modules=targets, modules_to_save=copied)
        assert ours(model, "llama")[0] == torchs(model)


@_OLD_NAME
def test_an_adapter_that_is_not_active_costs_nothing() -> None:
    model = _peft(meta_model(small_config("llama")))
    alone = ours(model, "llama")
    model.add_adapter("reference", model.peft_config["default"])  # type: ignore[operator, index]
    assert ours(model.to("meta"), "llama") == alone
    model.disable_adapter_layers()  # type: ignore[operator]
    frozen = meta_model(small_config("llama")).requires_grad_(False)
    assert ours(model, "llama") == ours(frozen, "llama")


def test_lora_on_queries_and_values_alone_saves_a_product_only_without_a_fused_kernel() -> None:
    """In the first layer nothing asks for the keys' gradient: eager skips it, fused kernels do not."""
    model = meta_model(small_config("llama"))
    add_lora(model, ("q_proj", "v_proj"))
    keys_gradient = 2 * 6 * 24 * TOTAL * TOTAL
    assert ours(model, "llama")[0] == torchs(model) + keys_gradient


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "family",
    [*FAMILIES, "opt", "hyperclovax", *(pytest.param(x, marks=pytest.mark.slow) for x in _CHECKPOINTED)],
)
def test_activation_checkpointing(family: str, reentrant: bool) -> None:
    model = meta_model(small_config(family)).train()
    checkpoint(model, reentrant=reentrant)
    assert ours(model, family) == (torchs(model), "full" if reentrant else "early_stop")


def test_a_policy_that_was_given_is_kept() -> None:
    model = meta_model(small_config("llama"))
    flops = FlopsModel.from_config(small_config("llama"), recompute="selective").for_module(model)
    assert flops.recompute == "selective"


@pytest.mark.parametrize(
    "wrap",
    [
        *(partial(torch.compile, backend="eager"), nn.ModuleList, lambda model: nn.Sequential(model)),
        lambda model: Fabric(accelerator="cpu", devices=1).setup_module(model, move_to_device=False),
    ],
)
@pytest.mark.parametrize("change", ["one_layer", "lora"])
def test_wrappers_change_nothing(wrap: Callable[..., nn.Module], change: str) -> None:
    model = meta_model(small_config("llama"))
    {**CHANGES, "lora": partial(add_lora, targets=("q_proj", "lm_head"))}[change](model)
    wrapped = wrap([model]) if wrap is nn.ModuleList else wrap(model)
    assert ours(wrapped, "llama") == ours(model, "llama")


def test_names_that_do_not_add_up_are_counted_by_their_share() -> None:
    """A module whose matmuls are not those of the config: half of its parameters trained, 2.5 units of 3."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))])
    model.layers[0][0].requires_grad_(False)  # type: ignore[index]
    config = small_config("llama")
    whole = FlopsModel.from_config(config)
    stats = SeqStats.from_lengths([TOTAL])
    per_layer = whole.training_flops(stats).linear // 4
    half = whole.for_module(model).training_flops(stats).linear
    assert whole.training_flops(stats).linear - half == per_layer // 6


def test_a_frozen_tower_costs_its_forward() -> None:
    from transformers import AutoModelForImageTextToText

    config = vision_config("qwen3_vl")
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    model.model.visual.requires_grad_(False)
    model.model.language_model.embed_tokens.requires_grad_(False)
    whole = FlopsModel.from_config(config)
    stats = SeqStats.from_lengths([TOTAL], image_grid_thw=[[1, 4, 8]])
    frozen = whole.for_module(model)
    assert frozen.training_flops(stats).vision == whole.forward_flops(stats).vision
    model.model.visual.merger.requires_grad_(True)
    merger = whole.for_module(model).training_flops(stats)
    assert whole.forward_flops(stats).vision < merger.vision < whole.training_flops(stats).vision
    assert merger.linear == whole.training_flops(stats).linear  # its gradient flows through every layer
