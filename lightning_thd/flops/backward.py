"""Layers and the module they describe -> the same layers with the backward pass that autograd will run.

The gradient of a trained weight costs as much as its forward. The gradient of the input of a weight, even of
a frozen one, costs the same again if anything trained runs before the weight. Sizes come from parameters and
``in_features``, not from classes, so adapters, sharded (DTensor) and quantized weights count in full.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import getclosurevars
from types import FunctionType
from typing import Any

from torch import nn

from lightning_thd._find import checkpoint_of
from lightning_thd._hooks import hooks_of
from lightning_thd.flops.families.layers import active_share
from lightning_thd.flops.families.sizes import Sizes
from lightning_thd.flops.terms import Cost, Layer, Recompute, Term, matmul

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
_HEAD = re.compile(r"(?:^|\.)(lm_head|embed_out|output)\.")
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

        path, _, leaf = name.rpartition(".")
        layer, inside = _locate(_plain_name(name), decoder)
        adapter = next((part for part in "AB" if f"lora_{part}" in inside), "")
        weight = Weight(
            path=inside,
            macs=_macs(owners[path], leaf, inside, parameter, active),
            trained=parameter.requires_grad,
            stage=_stage(inside),
            router=_is_router(inside),
            adapter=adapter,
            follows=not layer and any(key.startswith("layers.") for key in groups),
        )
        groups[layer].append(weight)

    return dict(groups)


def _plain_name(name: str) -> str:
    """Return the name of a module or parameter without the parts that wrappers add."""
    return _WRAPPERS.sub("", name + ".")[:-1]


def _is_idle(name: str, owners: dict[str, nn.Module]) -> bool:
    """Return whether PEFT does not run a weight: its adapter is not active, or a trained copy replaces it."""
    match = _OF_ADAPTER.search(name)
    if match is None:
        return False
    wrapper: Any = owners[name[: match.start()]]
    if not hasattr(wrapper, "active_adapters"):
        return False

    off = wrapper.disable_adapters or getattr(wrapper, "merged", False)
    active = () if off else wrapper.active_adapters
    kind, adapter = match.groups()
    if kind == "original_module":
        copies = getattr(wrapper, "modules_to_save", None)  # None if an adapter holds the module
        return copies is None or any(one in copies for one in active)
    return adapter not in active


def decoder_prefix(names: Iterable[str]) -> str:
    """Return what precedes ``layers.0`` in the names of the decoder's parameters; towers do not count."""
    layers_of: dict[str, set[str]] = defaultdict(set)  # by prefix, the numbers of the layers
    for name in names:
        plain = _WRAPPERS.sub("", name + ".")
        layer = _LAYER.search(plain)
        if layer and not _VISION.search(plain):
            layers_of[_before_layers(plain, layer)].add(layer.group(1))

    # A text model inside a larger one is the decoder; else the outermost list with the most layers is.
    of_text = [prefix for prefix in layers_of if _TEXT.search(prefix)]
    candidates = of_text or list(layers_of)
    return max(candidates, key=lambda prefix: (-prefix.count("."), len(layers_of[prefix])), default="")


def _before_layers(name: str, layer: re.Match[str]) -> str:
    """Return what precedes the list of layers in a name: "model" of "model.layers.0"."""
    list_of_layers = name[: layer.start(1)].rpartition(".")[0]
    return list_of_layers.rpartition(".")[0]


def _locate(name: str, decoder: str) -> tuple[str, str]:
    """Return the layer path of a parameter ("" outside all layers), and the name inside that layer."""
    vision = _VISION.search(name)
    if vision:
        return _locate_in_tower(name, vision.group(1))

    layer = _LAYER.search(name)
    if layer and _before_layers(name, layer) != decoder:
        return "", name  # a layer of an audio tower or a resampler
    if layer:
        number, inside = layer.groups()
        return f"layers.{number}", inside

    lone = _LONE_PROJECTION.search(name)
    if lone:
        return lone.group(1), name
    if _TRANSFORM.search(name):
        return "transform", name
    if _HEAD.search(name):
        return "lm_head", name
    return "", name


def _locate_in_tower(name: str, below_tower: str) -> tuple[str, str]:
    """Return what ``_locate`` does for a vision tower; ``below_tower`` is the end of the name."""
    if "patch_embed" in below_tower:
        return "visual.patch_embed", below_tower
    block = _LAYER.search(below_tower)
    if block:
        number, inside = block.groups()
        return f"visual.blocks.{number}", inside
    return "visual.merger", name


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
    inputs = getattr(owner, "in_features", None)
    outputs = getattr(owner, "out_features", None)
    if isinstance(inputs, int) and isinstance(outputs, int):  # a packed 4-bit weight has fewer elements
        passes = 2 if inside.split(".")[-2] in _TWICE else 1
        return inputs * outputs * passes
    return parameter.numel() if parameter.dim() == 2 else 0


def _is_router(inside: str) -> bool:
    """Return whether a weight, by its name in its layer, belongs to a router of experts."""
    parts = inside.split(".")[:-1]
    return bool(parts) and (parts[-1] in _ROUTER or "router" in parts)


def _stage(inside: str) -> float:
    """Return ``Weight.stage`` of a weight, by its name in its layer."""
    modules = _OF_ADAPTER.sub("", inside).split(".")[:-1]
    parts = [part.lower() for part in modules if part != "base_layer"]
    name = ".".join(parts)
    if "norm" in name or re.search(r"(^|\.)ln_", name):
        return _stage_of_norm(name, nested=len(parts) > 1)

    if "intermediate" in parts:  # the first product of BERT's MLP; "output" is the second
        return 2
    in_mlp = any(key in name for key in _MLP) or parts[:1] == ["output"]
    leaf = parts[-1] if parts else ""
    leads_out = leaf in _OUT or inside.endswith("down_proj")
    return 2 * in_mlp + leads_out


def _stage_of_norm(name: str, *, nested: bool) -> float:
    """Return when a norm runs; ``nested`` norms, such as q_norm, are inside a module of the layer."""
    if any(key in name for key in _SECOND_NORM):
        return 1.5
    if any(key in name for key in _LAST_NORM):
        return 4
    return 0.5 if nested else -1


_FINAL_NORM = ("norm", "ln_f", "ln_out")


def layers_of_module(
    layers: Sequence[Layer], module: nn.Module, reruns: Mapping[str, bool] | None = None
) -> tuple[tuple[Layer, ...], Recompute]:
    """Return the layers as ``module`` trains them, with adapters, and its checkpointing policy.

    Args:
        layers: the layers of the module's config.
        module: the model.
        reruns: the names of modules that a backward pass ran again, and whether each ran to its end. They say
            what a module without settings for checkpointing runs again.
    """
    groups = weights_by_layer(module, share_of_experts(module))
    rest = groups.get("", [])
    policy, checkpointed = checkpointing(module)
    if policy == "none" and reruns:
        policy, checkpointed = _seen_checkpointing(reruns, module)
    text_needs_gradients = _inputs_are_trained(module, rest)

    trained: list[Layer] = []
    upstream = False  # whether anything trained runs before the layer
    in_text = False  # the layers of a vision tower come first
    for layer in layers:
        if not in_text and not layer.path.startswith("visual"):
            in_text = True
            upstream = upstream or text_needs_gradients
        weights = groups.get(layer.path)
        if layer.path == "lm_head" and weights is None:  # tied to an embedding under another name
            weights = [weight for weight in rest if "embed" in weight.path or "wte" in weight.path]
        if weights:
            layer, upstream = _backward(layer, weights, upstream)
        parts = checkpointed.get(layer.path, set())
        if layer.path == "lm_head" and "" in parts:
            layer = replace(layer, recomputable=True)
        if checkpointed and "" not in parts:
            layer = _checkpointed_in_parts(layer, parts)
        trained.append(layer)
    return tuple(trained), policy


def _inputs_are_trained(module: nn.Module, outside_layers: list[Weight]) -> bool:
    """Return whether the input of the first text layer needs a gradient."""
    hooks = hooks_of(module.modules(), "forward")
    if any("enable_input_require_grads" in getattr(hook, "__qualname__", "") for hook in hooks):
        return True
    for weight in outside_layers:
        is_input = any(key in weight.path for key in _INPUTS)
        is_after = weight.follows or any(key in weight.path for key in _FINAL_NORM)
        if weight.trained and (is_input or not is_after):
            return True
    return False


def checkpointing(module: nn.Module) -> tuple[Recompute, dict[str, set[str]]]:
    """Return which activation checkpointing is on, and in which parts of which layers ("": all)."""
    functions: list[Any] = []
    layers: dict[str, set[str]] = defaultdict(set)
    decoder = decoder_prefix(name for name, _ in module.named_modules())
    for name, child in module.named_modules():
        function = _checkpoint_function(child)
        if function is None:
            continue
        functions.append(function)
        path, part = _part_of_layer(name, decoder)
        if path not in _OUTSIDE_LAYERS:
            layers[path].add(part)

    if not functions:
        return "none", layers
    keywords = _keywords(functions[0])
    if keywords.get("context_fn") is not None:
        return "selective", layers
    if keywords.get("use_reentrant", False) or not keywords.get("early_stop", True):
        return "full", layers
    return "early_stop", layers


def _part_of_layer(name: str, decoder: str) -> tuple[str, str]:
    """Return the layer path of a module, and which part it is: "mixer", "mlp", or "" for the layer itself."""
    # The name of a weight that the module would have locates the module.
    path, inside = _locate(_WRAPPERS.sub("", name + ".") + "weight", decoder)
    if inside == "weight":
        return path, ""
    return path, "mlp" if _stage(inside) > 1 else "mixer"


def _seen_checkpointing(
    reruns: Mapping[str, bool], module: nn.Module
) -> tuple[Recompute, dict[str, set[str]]]:
    """Return what ``checkpointing`` does, from modules that a backward pass ran again."""
    layers: dict[str, set[str]] = defaultdict(set)
    decoder = decoder_prefix(name for name, _ in module.named_modules())
    ran_to_their_ends: list[bool] = []
    whole_mixers: set[str] = set()  # layers whose mixer ran to its end
    for name, ran_to_its_end in reruns.items():
        path, part = _part_of_layer(name, decoder)
        if path == "lm_head" and ran_to_its_end:
            layers[path].add("")
        elif path not in _OUTSIDE_LAYERS:
            layers[path].add(part)
            if part == "mixer" and ran_to_its_end:
                whole_mixers.add(path)
            around = [other for other in reruns if other != name and f"{name}.".startswith(f"{other}.")]
            if not around and "" not in reruns:
                ran_to_their_ends.append(ran_to_its_end)

    if not layers:
        return "none", layers
    # A layer that calls its checkpoint inside its own forward shows only its parts.
    for path in whole_mixers:
        if "mlp" in layers[path]:
            layers[path].add("")
    return "full" if all(ran_to_their_ends) else "early_stop", layers


def _checkpoint_function(module: nn.Module) -> Any:
    """Return the function by which a module is checkpointed; None if it is not."""
    if getattr(module, "gradient_checkpointing", False) and module.training:  # else it does nothing
        return checkpoint_of(module)
    if type(module).__name__ == "CheckpointWrapper":
        return module
    return None


def _checkpointed_in_parts(layer: Layer, parts: set[str]) -> Layer:
    """Return a layer of which only the given ``parts`` ("mixer", "mlp") are checkpointed."""
    terms = []
    for term in layer.terms:
        part = "mlp" if term.name.startswith(_OF_MLP) else "mixer"
        if part in parts:  # "out" is the last product of a checkpointed mixer
            terms.append(replace(term, last=term.last or term.name == "out"))
        else:
            terms.append(replace(term, again=0))
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
            # The function that it closes over; a partial holds the keywords, so it goes first.
            callables = [value for value in getclosurevars(function).nonlocals.values() if callable(value)]
            partials = [value for value in callables if isinstance(value, partial)]
            inner = next(iter(partials or callables), None)
        if inner is None:
            break
        function = inner
    return {}


def _backward(layer: Layer, weights: list[Weight], upstream: bool) -> tuple[Layer, bool]:
    """Return a layer with its backward pass, and whether later layers need input gradients (``upstream``)."""
    # When the first trained weight runs; everything after it needs a gradient of its input.
    first = min((weight.stage for weight in weights if weight.trained), default=float("inf"))
    runs = upstream or first < float("inf")  # whether the layer has a backward pass at all
    base = [weight for weight in weights if not weight.adapter]
    adapters = [weight for weight in weights if weight.adapter]

    # If the module's matmul weights have the sizes that the config implies, the gradients are counted weight
    # by weight, in one term "backward". If not, each term has its gradients by the share that is trained.
    products = [term for term in layer.terms if _has_weight(term)]
    same_sizes = sum(2 * weight.macs for weight in base) == sum(term.forward for term in products)
    exact = same_sizes and len({term.basis for term in products}) == 1

    # A layer whose last product has an adapter ends with the adapter's second matmul.
    adapter_is_last = any(weight.stage == 3 for weight in adapters)
    terms = []
    for term in layer.terms:
        input_grad = term.input_grad
        weight_grad = term.weight_grad
        if term.kind == "router":
            if not (upstream or first < 2):
                input_grad = 0
            if not any(weight.router and weight.trained for weight in weights):
                weight_grad = 0
        elif _has_weight(term) and exact:
            input_grad = weight_grad = 0
        elif _has_weight(term):
            if not runs:
                input_grad = 0
            weight_grad = _trained_part(weight_grad, base or weights)
        elif term.kind != "embedding" and not (upstream or first < 1):  # scores and scans
            input_grad = 0
        last = term.last and not adapter_is_last
        terms.append(replace(term, input_grad=input_grad, weight_grad=weight_grad, last=last))
    terms += _adapter_terms(layer, adapters, upstream, first)

    if exact:
        reached = sum(2 * weight.macs for weight in base if upstream or first < weight.stage)
        trained = sum(2 * weight.macs for weight in base if weight.trained)
        grads: Any = {"forward": 0, "input_grad": reached, "weight_grad": trained}
        terms.append(replace(products[0], name="backward", last=False, **grads))
    return replace(layer, terms=tuple(terms), recomputable=layer.recomputable and runs), runs


def _trained_part(cost: Cost, weights: list[Weight]) -> Cost:
    """Return the part of a cost in proportion to the trained weights; whole FLOPs."""
    # Weights outside matmuls count as 1, so that the sum is above 0.
    total = sum(max(weight.macs, 1) for weight in weights)
    trained = sum(max(weight.macs, 1) for weight in weights if weight.trained)
    return cost * trained // total


def _has_weight(term: Term) -> bool:
    """Return whether a term multiplies by weights of the layer, other than a router's."""
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
