"""A converted model -> a table of its layers, and the share of its FLOPs in FP8."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from lightning_thd._find import model_with_head, recipe_of
from lightning_thd.flops.backward import share_of_experts, weights_by_layer
from lightning_thd.flops.model import FlopsModel
from lightning_thd.flops.rates import Work
from lightning_thd.precision.convert import is_converted, product_reason


@dataclass(frozen=True, kw_only=True, slots=True)
class FP8Report:
    """Which layers of a model multiply in FP8; ``print`` it for the table."""

    recipe: str | None  # None if this package has not converted the model
    engine: str | None  # likewise
    converted: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # name -> (inputs, outputs)
    kept: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # the same of other linear layers
    reasons: Mapping[str, str] = field(default_factory=dict)  # name -> why it is not in FP8, also of experts
    share: float = 0.0  # FP8's share of the training FLOPs of projections, MLPs and experts

    def __str__(self) -> str:
        names = [*self.converted, *self.reasons]
        width = max([len(name) for name in names], default=5)
        low_precision = f"{self.engine} {self.recipe}" if self.recipe else "FP8"
        lines = [f"{'layer':<{width}}  {'inputs':>7} {'outputs':>7}  runs in"]
        for name in sorted(names):
            # Experts whose weights are in one tensor have neither inputs nor outputs of their own.
            inputs, outputs = self.converted.get(name) or self.kept.get(name) or ("", "")
            runs_in = low_precision if name in self.converted else f"bf16: {self.reasons[name]}"
            lines.append(f"{name:<{width}}  {inputs:>7} {outputs:>7}  {runs_in}")
        lines.append(
            f"{len(self.converted)} layers in FP8, {len(self.reasons)} not; {self.share:.1%} of the FLOPs of "
            "projections, MLPs and experts."
        )
        return "\n".join(lines)


def fp8_report(model: nn.Module) -> FP8Report:
    """Return a report on which layers of a model multiply in FP8; ``print`` it for a table."""
    recipe = recipe_of(model)
    converted: dict[str, tuple[int, int]] = {}
    linear: dict[str, tuple[int, int]] = {}
    reasons: dict[str, str] = {}
    noted_reasons = model.__dict__.get("_thd_fp8_kept", {})  # by the conversion

    for name, child in model.named_modules():
        if is_converted(child):
            converted[name] = _sizes(child)
        elif isinstance(child, nn.Linear):
            linear[name] = _sizes(child)
            reasons[name] = noted_reasons.get(name, "was not converted")
        elif product_reason(child):
            reasons[name] = noted_reasons.get(name, product_reason(child))

    return FP8Report(
        recipe=recipe.name if recipe else None,
        engine=recipe.engine if recipe else None,
        converted=converted,
        kept=linear,
        reasons=reasons,
        share=fp8_share(model),
    )


def fp8_share(model: nn.Module, work: Work = "training") -> float:
    """Return which share of the linear FLOPs, without those of logits, runs in low precision."""
    recipe = recipe_of(model)
    if recipe is None:
        return 0.0

    model_of_head = model_with_head(model)
    head = None if model_of_head is None else model_of_head.get_output_embeddings()
    active = share_of_experts(model)
    low = 0.0  # multiply-adds per token in low precision
    for name, child in model.named_modules():
        if not is_converted(child) or child is head:
            continue
        is_trained = any(weight.requires_grad and weight.dim() > 1 for weight in child.parameters())
        products = 1
        if work == "training":
            products = 3 if is_trained else 2  # a frozen weight needs no gradient
        share_of_tokens = active if ".experts." in f".{name}." else 1.0
        share_of_products = min(1.0, recipe.gradients / products)
        low += math.prod(_sizes(child)) * share_of_tokens * share_of_products

    total = _linear_macs(model, active)
    return min(1.0, low / total) if total else 0.0


def _linear_macs(model: nn.Module, active: float) -> float:
    """Return the multiply-adds per token of all terms that the FLOPs breakdown counts as linear."""
    configs = [child.config for child in model.modules() if getattr(child, "config", None) is not None]
    try:
        flops = FlopsModel.from_config(configs[0])
    except (IndexError, ValueError):  # no config, or no family that is known: count the module's weights
        groups = weights_by_layer(model, active)
        return sum(weight.macs for path, weights in groups.items() if path != "lm_head" for weight in weights)
    terms = [term for layer in flops.layers for term in layer.terms]
    macs = sum(term.forward for term in terms if term.basis == "token" and term.kind == "linear")
    return float(macs) / 2


def _sizes(child: nn.Module) -> tuple[int, int]:
    """Return a layer's inputs and outputs."""
    return int(getattr(child, "in_features", 0)), int(getattr(child, "out_features", 0))
