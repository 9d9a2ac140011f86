"""A module -> its matmul weights by decoder layer: how large, trained or frozen, and when they run.

Works on what the modules hold (parameters, in_features), not on their classes, so that adapters, sharded
(DTensor) and quantized weights count by their full size.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

# wrappers of compile, FSDP and activation checkpointing put themselves into the names
_WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)\.")
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.(.+)$")
_VISION = re.compile(r"(?:^|\.)(?:visual|vision_tower|vision_model)\.(.+)$")
_TEXT = re.compile(r"(?:^|\.)(language_model|text_model)(?:\.|$)")
# projections outside the layers that are counted on their own
_OWN = re.compile(
    r"(?:^|\.)(per_layer_model_projection|altup_projections|altup_unembed_projections|hc_head|"
    r"project_in|project_out)\."
)
_TWICE = ("modality_router",)  # AltUp routes before and after a layer
_PLAIN_MATRICES = ("fn", "hc_fn")  # of hyper-connections: parameters without a module
_ROUTER = ("gate", "router", "shared_expert_gate")
_OUT = (
    *("o_proj", "out_proj", "c_proj", "down_proj", "fc2", "fc_out", "dense", "dense_4h_to_h"),
    *("output_linear", "wo", "w2", "dense_attention", "linear_fc2", "proj"),
)
_MLP = ("mlp", "feed_forward", "ffn", "expert", "moe", "fc1", "fc2", "router")
_LAST_NORM = ("post_feedforward", "post_mlp", "post_ff")
_SECOND_NORM = ("post_attention", "pre_feedforward", "ln_2", "norm2", "ffn_norm", "pre_ff", "pre_moe")


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """One matmul parameter: its size, whether it is trained, and when it runs in its layer.

    Attributes:
        path: its name, without the wrappers' parts.
        macs: multiply-adds a token, 0 for what is no matmul (norms, biases, convolutions).
        trained: whether it has a gradient.
        stage: order in a layer: 0 into the mixer, 1 out of it, 2 into the MLP, 3 out of it; norms between.
        adapter: "A" or "B" of a low-rank pair, else empty.
        router: it weighs experts.
    """

    path: str
    macs: int
    trained: bool
    stage: float
    adapter: str = ""
    router: bool = False


def weights_by_layer(module: nn.Module, active: float) -> dict[str, list[Weight]]:
    """Group the parameters of ``module`` by the layer paths of ``FlopsModel``.

    Args:
        module: the model, as built, wrapped or sharded.
        active: share of the routed experts a token goes through: top_k / num_experts.

    Returns:
        ``"layers.0"``, ``"visual.patch_embed"``, ``"visual.blocks.0"``, ``"visual.merger"``, ``"lm_head"``,
        and ``""`` for the rest.
    """
    owners = dict(module.named_modules(remove_duplicate=False))
    decoder = decoder_prefix(owners)
    groups: dict[str, list[Weight]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = owners[name.rpartition(".")[0]]
        group, inside = _locate(_WRAPPERS.sub("", name + ".")[:-1], decoder)
        groups[group].append(
            Weight(
                path=inside,
                macs=_macs(owner, name.rpartition(".")[2], inside, parameter, active),
                trained=parameter.requires_grad,
                stage=_stage(inside),
                router=_is_router(inside),
                adapter=next((part for part in "AB" if f"lora_{part}" in inside), ""),
            )
        )
    return dict(groups)


def decoder_prefix(names: Iterable[str]) -> str:
    """Return what stands before ``layers.0`` in the decoder's names, where towers have layers of their own.

    Args:
        names: of modules: ``"model.layers.1.mlp"`` and ``"model.audio.encoder.layers.0.mlp"``, for example.

    Returns:
        ``"model"`` for these: a language or text model's, else the least nested, else that of most layers.
    """
    indices: dict[str, set[str]] = defaultdict(set)
    for name in names:
        plain = _WRAPPERS.sub("", name + ".")
        if not _VISION.search(plain) and (layer := _LAYER.search(plain)):
            indices[plain[: layer.start(1)].rpartition(".")[0].rpartition(".")[0]].add(layer.group(1))
    named = [prefix for prefix in indices if _TEXT.search(prefix)]
    return max(named or indices, key=lambda prefix: (-prefix.count("."), len(indices[prefix])), default="")


def layer_path(module_name: str, decoder: str) -> str:
    """Return ``"layers.3"`` for the decoder layer ``"model.layers.3"``, "" for any other module.

    Args:
        module_name: as ``named_modules`` gives it.
        decoder: as ``decoder_prefix`` gives it.
    """
    group, inside = _locate(_WRAPPERS.sub("", module_name + ".") + "weight", decoder)
    return (
        group
        if inside == "weight" and group not in ("lm_head", "visual.merger", "visual.patch_embed")
        else ""
    )


def _locate(name: str, decoder: str) -> tuple[str, str]:
    vision = _VISION.search(name)
    layer = _LAYER.search(vision.group(1) if vision else name)
    if layer and not vision and name[: layer.start(1)].rpartition(".")[0].rpartition(".")[0] != decoder:
        return "", name  # an audio tower's, a resampler's
    if vision and vision.group(1).startswith("patch_embed"):
        return "visual.patch_embed", vision.group(1)
    if vision:
        return (f"visual.blocks.{layer.group(1)}", layer.group(2)) if layer else ("visual.merger", name)
    if layer:
        return f"layers.{layer.group(1)}", layer.group(2)
    if own := _OWN.search(name):
        return own.group(1), name
    head = re.search(r"(?:^|\.)(lm_head|embed_out|output)\.", name)
    return ("lm_head" if head else ""), name


def _macs(owner: nn.Module, leaf: str, inside: str, parameter: nn.Parameter, active: float) -> int:
    """Return the multiply-adds a token of one parameter; 0 for routers, which the count leaves out."""
    if _is_router(inside) or isinstance(owner, nn.Embedding):
        return 0
    if parameter.dim() == 3 and "expert" in inside:
        return round(parameter.numel() * active)
    if leaf in _PLAIN_MATRICES:
        return parameter.numel()
    if leaf != "weight":
        return 0
    sizes = getattr(owner, "in_features", None), getattr(owner, "out_features", None)
    if isinstance(sizes[0], int) and isinstance(sizes[1], int):  # a packed 4-bit weight has fewer elements
        return sizes[0] * sizes[1] * (2 if inside.split(".")[-2] in _TWICE else 1)
    return parameter.numel() if parameter.dim() == 2 else 0


def _is_router(inside: str) -> bool:
    parts = inside.split(".")[:-1]
    return bool(parts) and (parts[-1] in _ROUTER or "router" in parts)


def _stage(inside: str) -> float:
    parts = [part for part in inside.split(".")[:-1] if part not in ("base_layer", "default")]
    parts = [part for part in parts if not part.startswith("lora_")]
    name = ".".join(parts)
    if "norm" in name or re.search(r"(^|\.)ln_", name):
        inner = len(parts) > 1  # q_norm, k_norm, the gated norm of a state-space layer
        if any(key in name for key in _LAST_NORM):
            return 4
        return 0.5 if inner else (1.5 if any(key in name for key in _SECOND_NORM) else -1)
    second = 2 if any(key in name for key in _MLP) else 0
    leaf = parts[-1] if parts else ""
    return second + (1 if leaf in _OUT or inside.endswith("down_proj") else 0)
