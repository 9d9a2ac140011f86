"""An FP8 recipe -> its requirements for devices, layers and packs; a device -> its fastest precision."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_thd._checks import choice, flags
from lightning_thd._imports import require
from lightning_thd.alignment import Alignment, Layout
from lightning_thd.alignment import Recipe as Rules
from lightning_thd.boundaries.core import checked_device

Engine: TypeAlias = Literal["te", "torchao"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A method of scaling 8-bit (or 4-bit) numbers, with its engine and its requirements for packs."""

    name: str  # the name that users pass
    engine: Engine  # "te" or "torchao"
    rules: Rules = "tensorwise"  # the row of ``alignment.TOKEN_MULTIPLE``
    features: int = 16  # input and output features of a layer must be multiples of this
    capability: tuple[int, int] = (8, 9)  # the lowest compute capability; (8, 9) is Ada
    below: tuple[int, int] | None = None  # only compute capabilities below this are supported
    cuda: tuple[int, int] = (0, 0)  # the lowest CUDA version
    dtype: Literal["fp8", "fp4"] = "fp8"  # the column in the table of peaks
    gradients: int = 3  # how many of a layer's three matmuls (forward, two gradients) run in low precision
    config: Any = None  # the engine's own object: a Transformer Engine recipe or a ``Float8LinearConfig``
    emulate: bool = False  # torchao rounds numbers to FP8, and multiplies them in high precision

    def alignment(
        self, *, cp: int = 1, tp: int = 1, sequence_parallel: bool = False, layout: Layout = "dual_chunk"
    ) -> Alignment:
        """Return the multiples for lengths and slots of packs in a parallel layout."""
        return Alignment.for_(
            cp=cp, tp=tp, sequence_parallel=sequence_parallel, recipe=self.rules, layout=layout
        )

    @property
    def has_history(self) -> bool:
        """Return whether scales depend on earlier steps; graphs and recomputation would change them."""
        return self.name == "delayed"


# ``features``: Transformer Engine needs whole blocks of 128 or 32; other products need multiples of 16.
_RECIPES = (
    Recipe(name="delayed", engine="te"),
    Recipe(name="current", engine="te"),
    Recipe(name="blockwise", engine="te", rules="blockwise", features=128, capability=(9, 0), cuda=(12, 9)),
    Recipe(name="mxfp8", engine="te", rules="mxfp8", features=32, capability=(10, 0), below=(12, 0)),
    Recipe(name="nvfp4", engine="te", rules="nvfp4", features=32, capability=(10, 0), dtype="fp4"),
    Recipe(name="tensorwise", engine="torchao"),
    Recipe(name="rowwise", engine="torchao", capability=(9, 0)),
    Recipe(name="rowwise_with_gw_hp", engine="torchao", capability=(9, 0), gradients=2),
)
KNOWN_RECIPES: dict[tuple[Engine, str], Recipe] = {
    (recipe.engine, recipe.name): recipe for recipe in _RECIPES
}
_TE_CLASSES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
_EMULATE = "Train in bf16, or try FP8 on any device with engine='torchao', emulate=True, which gains no time."


def resolve(recipe: Any, engine: str, *, emulate: bool = False) -> Recipe:
    """Return the ``Recipe`` for a user's name or recipe object, importing its engine."""
    flags(emulate=emulate)
    choice(engine, "engine", "te", "torchao", advice="'te' is Transformer Engine.")
    if emulate and engine == "te":
        raise ValueError("emulate=True: Transformer Engine cannot emulate FP8. Use engine='torchao' with it.")

    if isinstance(recipe, str):
        return _named(recipe, engine, emulate)
    if engine == "te":
        return _te_object(recipe)
    return _torchao_object(recipe, emulate)


def _named(name: str, engine: str, emulate: bool) -> Recipe:
    """Return the recipe of a name, with the engine's own object for it."""
    if engine == "torchao" and name == "current":  # both names mean the same arithmetic
        name = "tensorwise"
    by_name = {recipe.name: recipe for recipe in _RECIPES if recipe.engine == engine}
    choice(name, "recipe", *by_name, advice=f"These are the recipes of engine={engine!r}.")
    recipe = by_name[name]
    if engine == "torchao":
        float8 = require("torchao.float8", feature=f"engine='torchao' (recipe={name!r})")
        config = float8.Float8LinearConfig.from_recipe_name(name)
        return replace(recipe, config=replace(config, emulate=emulate), emulate=emulate)
    te_recipes = require("transformer_engine.common.recipe", feature=f"engine='te' (recipe={name!r})")
    return replace(recipe, config=getattr(te_recipes, _TE_CLASSES[name])())


def _te_object(config: Any) -> Recipe:
    """Return the recipe of a Transformer Engine object, by the name of its class or of a parent."""
    lineage = [cls.__name__ for cls in type(config).__mro__]
    for name, cls in _TE_CLASSES.items():
        if cls in lineage:
            return replace(_named(name, "te", emulate=False), config=config)
    raise ValueError(
        f"recipe={config!r} is not a Transformer Engine recipe whose alignment is known. Give "
        f"{', '.join(map(repr, _TE_CLASSES))}, or an object of one of their classes in "
        "transformer_engine.common.recipe."
    )


def _torchao_object(config: Any, emulate: bool) -> Recipe:
    """Return the recipe that a torchao config describes; its own ``emulate`` counts too."""
    if type(config).__name__ != "Float8LinearConfig":
        raise ValueError(
            f"recipe={config!r} is not a torchao recipe. Give 'tensorwise', 'rowwise', 'rowwise_with_gw_hp' "
            "or a torchao.float8.Float8LinearConfig."
        )
    is_rowwise = config.cast_config_input.scaling_granularity.value == "axiswise"
    # "gw_hp": the gradient of the weight is multiplied in high precision.
    has_gw_hp = config.cast_config_input_for_grad_weight.scaling_type.value == "disabled"

    name = "tensorwise"
    if is_rowwise:
        name = "rowwise_with_gw_hp" if has_gw_hp else "rowwise"

    recipe = KNOWN_RECIPES["torchao", name]
    emulate = emulate or bool(config.emulate)
    return replace(
        recipe,
        config=replace(config, emulate=emulate),
        emulate=emulate,
        gradients=2 if has_gw_hp else 3,
    )


def check_device(recipe: Recipe, device: torch.device) -> None:
    """Raise if a device cannot multiply in the recipe's format."""
    if recipe.emulate:
        return
    if device.type != "cuda" or not torch.cuda.is_available():
        raise MisconfigurationException(
            f"recipe={recipe.name!r} needs a CUDA device of compute capability "
            f"{_dotted(recipe.capability)} or higher; training runs on {device.type!r}. {_EMULATE}"
        )
    if torch.version.hip is not None:
        if recipe.engine == "te":
            raise MisconfigurationException(
                "engine='te' is NVIDIA's. On an AMD GPU of the MI300 series or later use engine='torchao'."
            )
        return

    capability = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    advice = _EMULATE if capability < (8, 9) else "Use recipe='current', which runs from 8.9 on."
    if capability < recipe.capability:
        raise MisconfigurationException(
            f"{name} has compute capability {_dotted(capability)}; recipe={recipe.name!r} needs "
            f"{_dotted(recipe.capability)}. {advice}"
        )
    if recipe.below is not None and capability >= recipe.below:
        raise MisconfigurationException(
            f"{name} has compute capability {_dotted(capability)}; Transformer Engine has no "
            f"{recipe.name!r} products from {_dotted(recipe.below)} on. {advice}"
        )
    cuda = tuple(int(part) for part in str(torch.version.cuda or "0.0").split(".")[:2])
    if cuda < recipe.cuda:
        raise MisconfigurationException(
            f"recipe={recipe.name!r} needs CUDA {_dotted(recipe.cuda)}; this torch was built for "
            f"{torch.version.cuda}. Install a newer build of torch, or use recipe='current'."
        )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


# Volta is the first GPU with fp16 tensor cores, Ampere the first with bf16 ones (NVIDIA's white papers).
_FP16_CORES = (7, 0)


def fastest_precision(
    device: torch.device | str | None = None,
) -> Literal["bf16-mixed", "16-mixed", "32-true"]:
    """Return the ``precision`` for a Trainer or Fabric in which ``device`` is fastest.

    The default device is the GPU if torch finds one, else the CPU. GPUs with bf16 hardware, such as an H100,
    give ``"bf16-mixed"``, others with tensor cores, such as a T4, ``"16-mixed"``. The rest is ``"32-true"``.
    """
    has_gpu = torch.cuda.is_available()
    if device is None:
        device = "cuda" if has_gpu else "cpu"
    device = checked_device(device)
    if device.type != "cuda" or not has_gpu:
        return "32-true"
    with torch.cuda.device(device):
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16-mixed"
        return "16-mixed" if torch.cuda.get_device_capability() >= _FP16_CORES else "32-true"
