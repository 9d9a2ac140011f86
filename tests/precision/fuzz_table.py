"""Public functions of precision, for ``tests.fuzz``."""

from __future__ import annotations

import random
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_thd import precision
from tests.fuzz import Entry


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)).to(torch.bfloat16)


def _options(rng: random.Random) -> dict[str, Any]:
    return {
        "recipe": rng.choice(["tensorwise", "rowwise"]),
        "engine": "torchao",
        "keep": rng.choice([(), ["0"]]),
        "convert": rng.choice([None, lambda name, layer: True]),
        "min_features": rng.choice([0, 16]),
        "emulate": True,
    }


def _context(model: Any) -> None:
    with precision.fp8_context(model):
        pass


TABLE = {
    "precision.convert_linear": Entry(
        precision.convert_linear,
        lambda rng: {"model": _model(), **_options(rng)},
        also=(MisconfigurationException,),
    ),
    "precision.FP8Precision": Entry(
        precision.FP8Precision, lambda rng: {**_options(rng), "weights_dtype": torch.bfloat16}
    ),
    "precision.fastest_precision": Entry(precision.fastest_precision, lambda _: {"device": "cpu"}),
    "precision.fp8_context": Entry(_context, lambda _: {"model": _model()}),
    "precision.fp8_report": Entry(precision.fp8_report, lambda _: {"model": _model()}),
    "precision.Converted": Entry(precision.Converted, lambda _: {"names": ("0",), "kept": {"1": "small"}}),
}
