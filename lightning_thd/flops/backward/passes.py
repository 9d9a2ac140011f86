"""Layers and the module they describe -> the same layers with the backward pass that autograd will run.

A weight's gradient costs one forward more if the weight is trained; the gradient of its input one more if
anything trained runs before it. So a frozen weight costs 2 of 3 units above a trained one, 1 below all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from inspect import getclosurevars
from types import FunctionType
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl

from lightning_thd.flops.backward.weights import Weight, decoder_prefix, layer_path, weights_by_layer
from lightning_thd.flops.families.experts import active_share
from lightning_thd.flops.families.sizes import Sizes
from lightning_thd.flops.terms import Basis, Layer, Recompute, Term, matmul

_FINAL_NORM = ("norm", "ln_f", "ln_out")


def layers_of_module(layers: Sequence[Layer], module: nn.Module) -> tuple[tuple[Layer, ...], Recompute]:
    """Return the layers as ``module`` trains them, with adapters, and its checkpointing policy."""
    groups = weights_by_layer(module, _active(module))
    rest = groups.get("", [])
    before = [weight for weight in rest if not any(key in weight.path for key in _FINAL_NORM)]
    embedded = any(weight.trained for weight in before) or _forced_input_grad(module)
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
        if checkpointed and layer.recomputable and layer.path not in checkpointed:
            layer = replace(layer, recomputable=False)
        found.append(layer)
    return tuple(found), policy


def checkpointing(module: nn.Module) -> tuple[Recompute, set[str]]:
    """Return which activation checkpointing is switched on, and in which layers.

    Returns:
        The policy, and the paths of the checkpointed layers; no paths when it is not set layer by layer.
    """
    functions: list[Any] = []
    layers = set()
    decoder = decoder_prefix(name for name, _ in module.named_modules())
    for name, child in module.named_modules():
        function: Any = None
        if getattr(child, "gradient_checkpointing", False):
            function = getattr(child, "_gradient_checkpointing_func", None)
        elif type(child).__name__ == "CheckpointWrapper":
            function = child
        if function is not None:
            functions.append(function)
            if path := layer_path(name, decoder):
                layers.add(path)
    if not functions:
        return "none", layers
    keywords = _keywords(functions[0])
    if keywords.get("context_fn") is not None:
        return "selective", layers
    return ("full" if keywords.get("use_reentrant", False) else "early_stop"), layers


def _keywords(function: Any) -> dict[str, Any]:
    """Return keywords bound to a checkpoint function, also one wrapped in a closure."""
    if isinstance(function, nn.Module):  # torch's CheckpointWrapper
        reentrant = getattr(function, "checkpoint_impl", None) is CheckpointImpl.REENTRANT
        return {"use_reentrant": reentrant, **_keywords(getattr(function, "checkpoint_fn", None))}
    for _ in range(4):  # wrappers of wrappers; nobody stacks more
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
    """Return a layer with its own backward, and whether the layers after it need input gradients."""
    first = min((weight.stage for weight in weights if weight.trained), default=float("inf"))
    runs = upstream or first < float("inf")
    exact = _adds_up(layer, weights)
    terms = []
    for term in layer.terms:
        if term.kind == "router":
            terms.append(_router(term, weights, upstream or first < 2))
        elif _has_weight(term) and not exact:
            terms.append(_scaled(term, weights, runs))
        else:
            terms.append(_plain(term, upstream or first < 1))
    adapters = [weight for weight in weights if weight.adapter]
    if any(weight.stage == 3 for weight in adapters):  # the layer now ends with the adapter's second matmul
        terms = [replace(term, last=False) for term in terms]
    terms += _adapter_terms(layer, adapters, upstream, first)
    if exact:
        terms.append(_gradients(layer, [w for w in weights if not w.adapter], upstream, first))
    return replace(layer, terms=tuple(terms), recomputable=layer.recomputable and runs), runs


def _has_weight(term: Term) -> bool:
    return term.weight_grad > 0 and term.kind not in ("embedding", "router")


def _adds_up(layer: Layer, weights: list[Weight]) -> bool:
    """Return whether the matmul weights found in the module are those that the config implies."""
    bases = {term.basis for term in layer.terms if _has_weight(term)}
    if len(bases) != 1:
        return False
    here = sum(2 * weight.macs for weight in weights if not weight.adapter)
    return here == sum(term.forward for term in layer.terms if _has_weight(term))


def _plain(term: Term, input_grad: bool) -> Term:
    """Return a term without its weights' gradients, which are counted apart, or without input gradient."""
    if _has_weight(term):
        return replace(term, input_grad=0, weight_grad=0)
    return term if input_grad or term.kind == "embedding" else replace(term, input_grad=0)


def _router(term: Term, weights: list[Weight], input_grad: bool) -> Term:
    trained = any(weight.router and weight.trained for weight in weights)
    return replace(
        term,
        input_grad=term.input_grad if input_grad else 0,
        weight_grad=term.weight_grad if trained else 0,
    )


def _scaled(term: Term, weights: list[Weight], runs: bool) -> Term:
    """Scale a term's weight gradient by the share of trained parameters, where names are unknown."""
    total = sum(max(weight.macs, 1) for weight in weights)
    trained = sum(max(weight.macs, 1) for weight in weights if weight.trained)
    return replace(
        term,
        input_grad=term.input_grad if runs else 0,
        weight_grad=term.weight_grad * trained // total,
    )


def _gradients(layer: Layer, weights: list[Weight], upstream: bool, first: float) -> Term:
    """Return one term for the backward of all matmuls of a layer."""
    trained = sum(2 * weight.macs for weight in weights if weight.trained)
    reached = sum(2 * weight.macs for weight in weights if upstream or first < weight.stage)
    model = next(term for term in layer.terms if _has_weight(term))
    return replace(model, name="backward", forward=0, input_grad=reached, weight_grad=trained, last=False)


def _adapter_terms(layer: Layer, adapters: list[Weight], upstream: bool, first: float) -> Iterator[Term]:
    if not adapters:
        return
    basis: Basis = next(term.basis for term in layer.terms if _has_weight(term))
    kind = next(term.kind for term in layer.terms if _has_weight(term))
    for weight in adapters:
        # the input of B is the output of A, which is trained; A's input is that of the layer it adapts
        reached = weight.adapter == "B" or upstream or first < weight.stage
        last = weight.adapter == "B" and weight.stage == 3
        term = matmul(f"lora_{weight.adapter}", weight.macs, kind=kind, basis=basis, last=last)
        yield replace(
            term,
            input_grad=term.input_grad if reached else 0,
            weight_grad=term.weight_grad if weight.trained else 0,
        )


def _active(module: nn.Module) -> float:
    """Return the share of the routed experts that a token goes through, from the module's config."""
    for child in module.modules():
        config = getattr(child, "config", None)
        if config is not None and hasattr(config, "model_type"):
            sizes = Sizes(config)
            return active_share(sizes.sub("text_config") or sizes)
    return 1.0


def _forced_input_grad(module: nn.Module) -> bool:
    """Return whether ``enable_input_require_grads`` is on, as LoRA with checkpointing needs it."""
    return any(
        bool(getattr(child, name, None))
        for child in module.modules()
        for name in ("_require_grads_hook", "_require_grads_hooks")
    )
