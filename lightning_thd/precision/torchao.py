"""An ``nn.Linear`` -> torchao's, whose products round to FP8; hardware products or emulated ones."""

from __future__ import annotations

import sys

from torch import nn

from lightning_thd._imports import require
from lightning_thd.precision.recipes import Recipe


def make_linear(child: nn.Linear, recipe: Recipe) -> nn.Module:
    """Build torchao's FP8 layer with the parameters of ``child``."""
    module = require("torchao.float8.float8_linear", feature="engine='torchao'")
    made: nn.Module = module.Float8Linear.from_float(child, config=recipe.config)
    return made


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is torchao's FP8 layer, without importing torchao."""
    loaded = sys.modules.get("torchao.float8.float8_linear")
    return loaded is not None and isinstance(module, loaded.Float8Linear)


def patch_inductor() -> None:
    """Apply torchao's workaround of a Triton fault, as its own conversion does before compiling."""
    patch = sys.modules.get("torchao.float8._inductor_patch")
    if patch is None:
        try:
            patch = require("torchao.float8._inductor_patch", feature="engine='torchao'")
        except ModuleNotFoundError:  # before torchao 0.18
            return
    apply = getattr(patch, "_patch_inductor_min_max_codegen", None)
    if apply is not None:
        apply()
