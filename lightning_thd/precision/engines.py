"""An ``nn.Linear`` -> the layer of Transformer Engine (2.4 on) or torchao that multiplies in FP8."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_thd._imports import require
from lightning_thd.precision.recipes import Recipe

_TORCHAO = "engine='torchao'"


def make_linear(child: nn.Linear, recipe: Recipe) -> nn.Module:
    """Build the engine's layer with the parameters of ``child``."""
    made: nn.Module
    if recipe.engine == "torchao":
        module = require("torchao.float8.float8_linear", feature=_TORCHAO)
        made = module.Float8Linear.from_float(child, config=recipe.config)
        return made
    engine = require("transformer_engine.pytorch", feature="engine='te'")
    made = engine.Linear(
        child.in_features,
        child.out_features,
        bias=child.bias is not None,
        params_dtype=child.weight.dtype,
        device="meta",  # no memory is taken twice
    )
    made.weight = child.weight
    if child.bias is not None:
        made.bias = child.bias
    return made


def is_converted(module: nn.Module) -> bool:
    """Return whether a layer multiplies in FP8, by this package's conversion or an engine's own."""
    te = sys.modules.get("transformer_engine.pytorch")
    if te is not None and isinstance(module, te.Linear):
        return True
    torchao = sys.modules.get("torchao.float8.float8_linear")
    return torchao is not None and isinstance(module, torchao.Float8Linear)


def is_te_layer(module: nn.Module) -> bool:
    """Return whether a module is one of Transformer Engine's."""
    return any(cls.__module__.startswith("transformer_engine.") for cls in type(module).__mro__)


def autocast(recipe: Recipe, group: Any = None) -> AbstractContextManager[Any]:
    """Enter Transformer Engine's low-precision region, under the name its version uses."""
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


def patch_inductor() -> None:
    """Apply torchao's workaround of a Triton fault, as its own conversion does before compiling."""
    patch = sys.modules.get("torchao.float8._inductor_patch")
    if patch is None:
        try:
            patch = require("torchao.float8._inductor_patch", feature=_TORCHAO)
        except ModuleNotFoundError:  # before torchao 0.18
            return
    apply = getattr(patch, "_patch_inductor_min_max_codegen", None)
    if apply is not None:
        apply()
