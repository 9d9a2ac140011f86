"""An ``nn.Linear`` -> the layer of Transformer Engine (2.4 on) or torchao that multiplies in FP8."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

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
