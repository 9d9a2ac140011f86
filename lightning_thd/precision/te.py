"""An ``nn.Linear`` -> Transformer Engine's, and the region its products run in, in versions from 2.4 on."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_thd._imports import require
from lightning_thd.precision.recipes import Recipe


def make_linear(child: nn.Linear, recipe: Recipe) -> nn.Module:
    """Build Transformer Engine's linear layer with the parameters of ``child``.

    It is built on the meta device, so that no memory is taken twice, and takes the weight and bias over.
    """
    engine = require("transformer_engine.pytorch", feature="engine='te'")
    made: nn.Module = engine.Linear(
        child.in_features,
        child.out_features,
        bias=child.bias is not None,
        params_dtype=child.weight.dtype,
        device="meta",
    )
    made.weight = child.weight
    if child.bias is not None:
        made.bias = child.bias
    return made


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is Transformer Engine's linear layer, without importing the engine."""
    loaded = sys.modules.get("transformer_engine.pytorch")
    return loaded is not None and isinstance(module, loaded.Linear)


def autocast(recipe: Recipe, group: Any = None) -> AbstractContextManager[Any]:
    """Enter Transformer Engine's low-precision region, under the name its version uses.

    Args:
        recipe: of Transformer Engine.
        group: the ranks that share the statistics of delayed scaling; None for this rank alone.
    """
    engine = require("transformer_engine.pytorch", feature="engine='te'")
    region: AbstractContextManager[Any]
    if hasattr(engine, "autocast"):
        region = engine.autocast(enabled=True, recipe=recipe.config, amax_reduction_group=group)
    else:
        region = engine.fp8_autocast(enabled=True, fp8_recipe=recipe.config, fp8_group=group)
    return region


def in_region() -> bool:
    """Return whether products run in low precision now; True where the engine's state is not found."""
    # quantization from 2.9 on, fp8 before
    engines = (sys.modules.get(f"transformer_engine.pytorch.{name}") for name in ("quantization", "fp8"))
    states = [getattr(engine, "FP8GlobalStateManager", None) for engine in engines]
    known = [state for state in states if state is not None]
    return not known or any(state.is_fp8_enabled() for state in known)


class WarnOutside:
    """A forward pre-hook that warns when a layer's first training pass runs outside of a region.

    Transformer Engine then multiplies in bf16 without a word.
    """

    def __init__(self) -> None:
        self.checked = False

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Look once, at the first pass with gradients."""
        if self.checked or not torch.is_grad_enabled():
            return
        self.checked = True
        if not in_region():
            rank_zero_warn(
                "A model that convert_linear converted for Transformer Engine trains outside of its region, "
                "so in bf16. Use Trainer(plugins=FP8Precision(...)), or run the model in "
                "`with lightning_thd.precision.fp8_context(model):`."
            )
