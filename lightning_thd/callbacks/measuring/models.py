"""A LightningModule -> the FlopsModel of the model inside it."""

from __future__ import annotations

from typing import Literal, TypeAlias

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_thd.flops.model import FlopsModel
from lightning_thd.flops.terms import Causal, Recompute, Tokens

Policy: TypeAlias = Recompute | Literal["auto"]


def find_model(
    module: nn.Module,
    *,
    causal: Causal,
    tokens: Tokens,
    recompute: Policy,
) -> FlopsModel | None:
    """Read the outermost transformers config in ``module``, and what of the model is trained.

    Args:
        module: the LightningModule.
        causal: how pairs are counted.
        tokens: what a token is.
        recompute: "auto" reads the activation checkpointing off the model.

    Returns:
        None, having said why, when there is no config, or one of an unknown family.
    """
    for name, child in module.named_modules():
        config = getattr(child, "config", None)
        if config is None or not getattr(config, "model_type", None):
            continue
        try:
            model = FlopsModel.from_config(
                config, causal=causal, tokens=tokens, recompute="none" if recompute == "auto" else recompute
            )
        except ValueError as unknown:
            rank_zero_info(f"FLOPs of {name or type(module).__name__}: {unknown}")
            return None
        return follow(model, child, recompute=recompute)
    return None


def follow(model: FlopsModel, module: nn.Module, *, recompute: Policy) -> FlopsModel:
    """``model.for_module(module)``, with a recompute policy that was given kept."""
    from dataclasses import replace

    found = model.for_module(module)
    return found if recompute == "auto" else replace(found, recompute=recompute)


def training_signature(module: nn.Module) -> int:
    """A number that changes when weights are frozen, unfrozen or added."""
    return hash(tuple(parameter.requires_grad for parameter in module.parameters()))
