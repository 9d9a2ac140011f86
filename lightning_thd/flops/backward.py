"""Layers and the module they describe -> the same layers with the backward pass that autograd will run.

The gradient of a trained weight costs as much as its forward. The gradient of the input of a weight, even of
a frozen one, costs the same again if anything trained runs before the weight. Sizes come from parameters and
``in_features``, not from classes, so adapters, sharded (DTensor) and quantized weights count in full.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import getclosurevars
from types import FunctionType
from typing import Any

from torch import nn

from lightning_thd.flops.families.layers import active_share
from lightning_thd.flops.families.sizes import Sizes
from lightning_thd.flops.terms import Layer, Recompute, Term, matmul

# Wrappers of compile, FSDP, Fabric, checkpointing and PEFT's trained copies add these parts to the names.
_WRAPPERS = re.compile(
    r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module|"
    r"modules_to_save\.[^.]+|module)\."
)
_TWIN = "_original_module."  # Fabric's second name for the module that it wraps
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.(.+)$")
_VISION = re.compile(r"(?:^|\.)(?:visual|vision_tower|vision_model|multi_modal_projector)\.(.+)$")
_TEXT = re.compile(r"(?:^|\.)(language_model|text_model)(?:\.|$)")
# Projections outside the decoder layers, each of which counts as a layer of its own name.
_LONE_PROJECTION = re.compile(
    r"(?:^|\.)(per_layer_model_projection|altup_projections|altup_unembed_projections|hc_head|"
    r"project_in|project_out)\."
)
_TRANSFORM = re.compile(r"(?:^|\.)(predictions\.transform|vocab_transform|lm_head\.dense|head\.dense)\.")
# Parts of the names of modules that run before the layers, even if they are listed after the layers.
_INPUTS = ("embed", "prompt", "prefix", "tower", "audio", "wte", "wpe")
_OF_MLP = ("mlp", "experts", "latent_", "router", "shared")  # beginnings of the names of an MLP's terms
_OUTSIDE_LAYERS = ("", "lm_head", "transform", "visual.merger", "visual.patch_embed")  # not in layers
_TWICE = ("modality_router",)  # AltUp's router, which runs before and after its layer
_PLAIN_MATRICES = ("fn", "hc_fn")  # matrices of hyper-connections, which are in no ``nn.Linear``
_ROUTER = ("gate", "router", "shared_expert_gate")
_OUT = (  # the last matmul of a mixer or an MLP
    *("o_proj", "out_proj", "c_proj", "down_proj", "fc2", "fc_out", "dense", "dense_4h_to_h"),
    *("output_linear", "wo", "w2", "dense_attention", "linear_fc2", "proj", "out_lin", "lin2", "o"),
    *("linear_2", "2"),
)
_MLP = ("mlp", "feed_forward", "ffn", "expert", "moe", "fc1", "fc2", "router")
# PEFT's additional weights, and the model's own weights that a trained copy replaces.
_OF_ADAPTER = re.compile(r"\.(lora_\w+|modules_to_save|original_module)\.([^.]+)")
_LAST_NORM = ("post_f", "post_mlp", "output.layernorm", "output_layer_norm", "transform.layernorm")
_SECOND_NORM = (
    *("post_attention", "pre_feedforward", "ln_2", "norm2", "ffn_norm", "pre_ff", "pre_moe", "mlp_norm"),
    *("attention.output.layernorm", "attention.layernorm", "sa_layer_norm"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """One parameter of a layer: its size, whether it is trained, and when it runs in its layer."""

    path: str
    macs: int  # multiply-adds per token; 0 for routers, and if the weight is not in a matmul
    trained: bool
    stage: float  # order: 0, 1: into, out of the mixer; 2, 3: into, out of the MLP; norms: -1, 0.5, 1.5, 4
    adapter: str = ""  # "A" or "B" of a low-rank pair
    router: bool = False
    follows: bool = False  # outside the layers, and listed after the first layer


def weights_by_layer(module: nn.Module, active: float) -> dict[str, list[Weight]]:
    """Group parameters by layer path; ``active`` is the share of routed experts that a token runs through."""
    owners = dict(module.named_modules(remove_duplicate=False))
    decoder = decoder_prefix(owners)
    groups: dict[str, list[Weight]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if _TWIN in name or _is_idle(name, owners):
            continue
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
                follows=not group and any(key.startswith("layers.") for key in groups),
            )
        )
    return dict(groups)


def _is_idle(name: str, owners: dict[str, nn.Module]) -> bool:
    """Return whether PEFT does not run a weight: its adapter is not active, or a trained copy replaces it."""
    found = _OF_ADAPTER.search(name)
    wrapper: Any = owners[name[: found.start()]] if found else None
    if found is None or not hasattr(wrapper, "active_adapters"):
        return False
    off = wrapper.disable_adapters or getattr(wrapper, "merged", False)
    active = () if off else wrapper.active_adapters
    if found.group(1) == "original_module":
        copies = getattr(wrapper, "modules_to_save", None)  # None if an adapter holds the module
        return copies is None or any(adapter in copies for adapter in active)
    return found.group(2) not in active


def decoder_prefix(names: Iterable[str]) -> str:
    """Return what precedes ``layers.0`` in the names of the decoder's parameters; towers do not count."""
    indices: dict[str, set[str]] = defaultdict(set)
    for name in names:
        plain = _WRAPPERS.sub("", name + ".")
        if not _VISION.search(plain) and (layer := _LAYER.search(plain)):
            indices[plain[: layer.start(1)].rpartition(".")[0].rpartition(".")[0]].add(layer.group(1))
    named = [prefix for prefix in indices if _TEXT.search(prefix)]
    return max(named or indices, key=lambda prefix: (-prefix.count("."), len(indices[prefix])), default="")


def _locate(name: str, decoder: str) -> tuple[str, str]:
    """Return the layer path of a parameter ("" outside all layers), and the name inside that layer."""
    vision = _VISION.search(name)
    layer = _LAYER.search(vision.group(1) if vision else name)
    if layer and not vision and name[: layer.start(1)].rpartition(".")[0].rpartition(".")[0] != decoder:
        return "", name  # a layer of an audio tower or a resampler
    if vision and "patch_embed" in vision.group(1):
        return "visual.patch_embed", vision.group(1)
    if vision:
        return (f"visual.blocks.{layer.group(1)}", layer.group(2)) if layer else ("visual.merger", name)
    if layer:
        return f"layers.{layer.group(1)}", layer.group(2)
    if lone := _LONE_PROJECTION.search(name):
        return lone.group(1), name
    if _TRANSFORM.search(name):
        return "transform", name
    head = re.search(r"(?:^|\.)(lm_head|embed_out|output)\.", name)
    return ("lm_head" if head else ""), name


def _macs(owner: nn.Module, leaf: str, inside: str, parameter: nn.Parameter, active: float) -> int:
    """Return one parameter's multiply-adds per token; 0 for routers, whose terms are kept apart."""
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
    parts = [part for part in _OF_ADAPTER.sub("", inside).split(".")[:-1] if part != "base_layer"]
    parts = [part.lower() for part in parts]
    name = ".".join(parts)
    if "norm" in name or re.search(r"(^|\.)ln_", name):
        inner = len(parts) > 1  # q_norm, k_norm, the gated norm of a state-space layer
        if any(key in name for key in _SECOND_NORM):
            return 1.5
        return 4 if any(key in name for key in _LAST_NORM) else 0.5 if inner else -1
    if "intermediate" in parts:  # the first product of BERT's MLP; "output" is the second
        return 2
    second = 2 if any(key in name for key in _MLP) or parts[:1] == ["output"] else 0
    leaf = parts[-1] if parts else ""
    return second + (1 if leaf in _OUT or inside.endswith("down_proj") else 0)


_FINAL_NORM = ("norm", "ln_f", "ln_out")


def layers_of_module(layers: Sequence[Layer], module: nn.Module) -> tuple[tuple[Layer, ...], Recompute]:
    """Return the layers as ``module`` trains them, with adapters, and its checkpointing policy."""
    groups = weights_by_layer(module, share_of_experts(module))
    rest = groups.get("", [])
    before = [
        weight
        for weight in rest
        if any(key in weight.path for key in _INPUTS)
        or not (weight.follows or any(key in weight.path for key in _FINAL_NORM))
    ]
    hooks = ("_require_grads_hook", "_require_grads_hooks")  # set by enable_input_require_grads
    forced = any(getattr(child, name, None) for child in module.modules() for name in hooks)
    embedded = forced or any(weight.trained for weight in before)
    policy, checkpointed = checkpointing(module)
    found, upstream, seen = [], False, False
    for layer in layers:
        if not layer.path.startswith("visual") and not seen:
            upstream, seen = upstream or embedded, True
        weights = groups.get(layer.path)
        if layer.path == "lm_head" and weights is None:  # tied to an embedding under another name
            weights = [weight for weight in rest if "embed" in weight.path or "wte" in weight.path]
        if weights:
            layer, upstream = _backward(layer, weights, upstream)
        if checkpointed and "" not in (parts := checkpointed.get(layer.path, set())):
            layer = _checkpointed_in_parts(layer, parts)
        found.append(layer)
    return tuple(found), policy


def checkpointing(module: nn.Module) -> tuple[Recompute, dict[str, set[str]]]:
    """Return which activation checkpointing is on, and in which parts of which layers ("": all)."""
    functions: list[Any] = []
    layers: dict[str, set[str]] = defaultdict(set)
    decoder = decoder_prefix(name for name, _ in module.named_modules())
    for name, child in module.named_modules():
        function: Any = None
        if getattr(child, "gradient_checkpointing", False) and child.training:  # else it does nothing
            function = getattr(child, "_gradient_checkpointing_func", None)
        elif type(child).__name__ == "CheckpointWrapper":
            function = child
        if function is not None:
            functions.append(function)
            path, inside = _locate(_WRAPPERS.sub("", name + ".") + "weight", decoder)
            if path not in _OUTSIDE_LAYERS:
                part = "mlp" if _stage(inside) > 1 else "mixer"
                layers[path].add("" if inside == "weight" else part)
    if not functions:
        return "none", layers
    keywords = _keywords(functions[0])
    if keywords.get("context_fn") is not None:
        return "selective", layers
    whole = keywords.get("use_reentrant", False) or not keywords.get("early_stop", True)
    return ("full" if whole else "early_stop"), layers


def _checkpointed_in_parts(layer: Layer, parts: set[str]) -> Layer:
    """Return a layer of which only the given ``parts`` ("mixer", "mlp") are checkpointed."""
    terms = (
        replace(term, last=term.last or term.name == "out")
        if ("mlp" if term.name.startswith(_OF_MLP) else "mixer") in parts
        else replace(term, again=0)
        for term in layer.terms
    )
    return replace(layer, terms=tuple(terms), recomputable=layer.recomputable and bool(parts))


def _keywords(function: Any) -> dict[str, Any]:
    """Return the keywords that are bound to a checkpoint function, even inside closures."""
    if isinstance(function, nn.Module):  # torch's CheckpointWrapper
        # An enum of torch's CheckpointWrapper, by its public member's name.
        reentrant = getattr(getattr(function, "checkpoint_impl", None), "name", "") == "REENTRANT"
        return {"use_reentrant": reentrant, **_keywords(getattr(function, "checkpoint_fn", None))}
    for _ in range(4):  # wrappers may wrap wrappers; four levels are enough
        if isinstance(function, partial):
            return dict(function.keywords)
        inner = getattr(function, "__wrapped__", None)
        if inner is None and isinstance(function, FunctionType):
            held = [value for value in getclosurevars(function).nonlocals.values() if callable(value)]
            bound = [value for value in held if isinstance(value, partial)]
            inner = next(iter(bound or held), None)
        if inner is None:
            break
        function = inner
    return {}


def _backward(layer: Layer, weights: list[Weight], upstream: bool) -> tuple[Layer, bool]:
    """Return a layer with its backward pass, and whether later layers need input gradients (``upstream``)."""
    first = min((weight.stage for weight in weights if weight.trained), default=float("inf"))
    runs = upstream or first < float("inf")
    products = [term for term in layer.terms if _has_weight(term)]
    own, adapters = ([w for w in weights if bool(w.adapter) is added] for added in (False, True))
    # True if the module's matmul weights have the sizes that the config implies.
    exact = len({term.basis for term in products}) == 1 and (
        sum(2 * weight.macs for weight in own) == sum(term.forward for term in products)
    )
    terms = []
    for term in layer.terms:
        inputs, learned = term.input_grad, term.weight_grad
        if term.kind == "router":
            inputs = inputs if upstream or first < 2 else 0
            learned = learned if any(weight.router and weight.trained for weight in weights) else 0
        elif _has_weight(term) and exact:  # the term "backward" below counts them
            inputs = learned = 0
        elif _has_weight(term):  # the sizes disagree: use the trained share of the module's sizes
            share = [(max(weight.macs, 1), weight.trained) for weight in own or weights]
            inputs = inputs if runs else 0
            learned = learned * sum(macs for macs, on in share if on) // sum(macs for macs, _ in share)
        elif term.kind != "embedding":
            inputs = inputs if upstream or first < 1 else 0
        # A layer whose last product has an adapter ends with the adapter's second matmul.
        last = term.last and all(weight.stage != 3 for weight in adapters)
        terms.append(replace(term, input_grad=inputs, weight_grad=learned, last=last))
    terms += _adapter_terms(layer, adapters, upstream, first)
    if exact:
        reached = sum(2 * weight.macs for weight in own if upstream or first < weight.stage)
        trained = sum(2 * weight.macs for weight in own if weight.trained)
        grads: Any = {"forward": 0, "input_grad": reached, "weight_grad": trained}
        terms.append(replace(products[0], name="backward", last=False, **grads))
    return replace(layer, terms=tuple(terms), recomputable=layer.recomputable and runs), runs


def _has_weight(term: Term) -> bool:
    return term.weight_grad > 0 and term.kind not in ("embedding", "router")


def _adapter_terms(layer: Layer, adapters: list[Weight], upstream: bool, first: float) -> Iterator[Term]:
    """Yield the terms of a layer's low-rank adapters; ``first`` is the stage of its first trained weight."""
    if not adapters:
        return
    like = next(term for term in layer.terms if _has_weight(term))
    for weight in adapters:
        # B needs an input gradient, because A counts as trained. A needs one if an earlier weight is trained.
        reached = weight.adapter == "B" or upstream or first < weight.stage
        last = weight.adapter == "B" and weight.stage == 3
        name = ("mlp_" if weight.stage > 1 else "") + f"lora_{weight.adapter}"
        term = matmul(name, weight.macs, kind=like.kind, basis=like.basis, last=last)
        yield replace(term, input_grad=term.forward * reached, weight_grad=term.forward * weight.trained)


def share_of_experts(module: nn.Module) -> float:
    """Return the share of the routed experts that a token goes through, from the module's config."""
    configs = (getattr(child, "config", None) for child in module.modules())
    sizes = next((Sizes(config) for config in configs if hasattr(config, "model_type")), None)
    return 1.0 if sizes is None else active_share(sizes.sub("text_config") or sizes)
