"""A LightningModule -> the FlopsModel of every model inside it: policy, reference, teacher, student."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_thd.callbacks.measuring.calls import Passes
from lightning_thd.flops.model import FlopsModel
from lightning_thd.flops.several import Member, join
from lightning_thd.flops.terms import Causal, Layer, Recompute, Tokens, matmul
from lightning_thd.parallel.pipeline.cut import stages_in

Policy: TypeAlias = Recompute | Literal["auto"]

_HEADS = ("score", "classifier", "classification_head", "v_head", "value_head")
_UNCOUNTED = 0.05  # share of the weights outside every known model from which on it is worth a warning


def models_in(module: nn.Module) -> dict[str, nn.Module]:
    """Find the outermost modules with a transformers config, each once, by path; a bare model's is ""."""
    found: dict[str, nn.Module] = {}
    for name, child in module.named_modules():
        inside = any(name.startswith(f"{outer}.") or outer == "" for outer in found)
        if not inside and getattr(getattr(child, "config", None), "model_type", None):
            found[name] = child
    return found


def find_model(
    module: nn.Module,
    *,
    causal: Causal,
    tokens: Tokens,
    recompute: Policy,
    passes: Mapping[str, Passes] | None = None,
) -> FlopsModel | None:
    """Count every transformers model in ``module``, and which weights are trained; ``passes`` is by path.

    Returns:
        None, having said why, when there is no config, or one of an unknown family.
    """
    models = models_in(module)
    members = []
    for path, child in models.items():
        name = path or type(module).__name__
        through = (passes or {}).get(path, Passes())
        if through.training or through.forward:
            try:
                model = FlopsModel.from_config(
                    child.config, causal=causal, tokens=tokens, recompute=_given(recompute)
                )
            except ValueError as unknown:
                rank_zero_info(f"FLOPs of {name}: {unknown}")
                return None
            model = _with_own_head(follow(model, child, recompute=recompute), child, module)
            members.append(Member(name=name, model=model, training=through.training, forward=through.forward))
    if not members:
        return None
    _tell_what_is_left_out(module, models)
    return join(members)


def follow(model: FlopsModel, module: nn.Module, *, recompute: Policy) -> FlopsModel:
    """Update ``model`` to what of ``module`` is trained; a given recompute policy is kept."""
    stage = next(stages_in(module), None)
    found = model.for_module(module if stage is None or stage.whole is None else stage.whole)
    return found if recompute == "auto" else replace(found, recompute=recompute)


def training_signature(module: nn.Module) -> int:
    """Return a number that changes when weights are frozen, unfrozen or added."""
    return hash(tuple(parameter.requires_grad for parameter in module.parameters()))


def _given(recompute: Policy) -> Recompute:
    return "none" if recompute == "auto" else recompute


def _with_own_head(model: FlopsModel, child: nn.Module, module: nn.Module) -> FlopsModel:
    """Replace the logits of a model without a language head by its own head: reward, class or value.

    A model without any head keeps its logits where a layer of that size stands beside it in ``module``.
    """
    output: Any = getattr(child, "get_output_embeddings", None)
    try:
        if output is None or output() is not None:
            return model
    except (AttributeError, NotImplementedError):
        return model
    heads = [getattr(child, name) for name in _HEADS if isinstance(getattr(child, name, None), nn.Linear)]
    vocabulary = getattr(child.config, "vocab_size", None)
    beside = any(isinstance(one, nn.Linear) and one.out_features == vocabulary for one in module.modules())
    if not heads and beside:
        return model
    layers = [layer for layer in model.layers if layer.path != "lm_head"]
    for head in heads:
        term = matmul("head", head.in_features * head.out_features, kind="logits")
        trained = head.weight.requires_grad
        term = replace(term, weight_grad=term.weight_grad if trained else 0)
        layers.append(Layer(path="head", terms=(term,), recomputable=False))
    return replace(model, layers=tuple(layers))


def _tell_what_is_left_out(module: nn.Module, models: Mapping[str, nn.Module]) -> None:
    """Warn where many of the weights belong to no model whose FLOPs are counted."""
    counted = {id(parameter) for model in models.values() for parameter in model.parameters()}
    rest = {
        name: parameter.numel()
        for name, parameter in module.named_parameters()
        if id(parameter) not in counted and parameter.dim() > 1
    }
    total = sum(parameter.numel() for parameter in module.parameters())
    if total and sum(rest.values()) > _UNCOUNTED * total:
        names = sorted({name.split(".")[0] for name in rest})
        rank_zero_warn(
            f"FLOPs are counted for {', '.join(models) or type(module).__name__}, but "
            f"{sum(rest.values()) / total:.0%} of the weights are in {', '.join(names)}, which no config "
            "describes: MFU is too low by what they cost. Pass flops_model= to count everything."
        )
