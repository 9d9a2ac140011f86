"""A model with ``nn.Linear`` layers -> the same model, in place, whose linear layers multiply in FP8.

A replacement holds the same parameter objects and hooks as the layer that it replaces. So ties and optimizer
groups stay valid, no weight is copied, and a model on the meta device stays there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_thd._checks import whole_number
from lightning_thd._find import recipe_of
from lightning_thd._hooks import attributes_of_hooks
from lightning_thd._imports import require
from lightning_thd.flops.backward import checkpointing
from lightning_thd.precision.recipes import Recipe, check_device, resolve

KEEP = ("lm_head", "*router*", "*gate", "visual.*", "vision_tower.*", "vision_model.*", "*lora_*")
_MARK = "_thd_fp8"  # the attribute of a converted model and of its FP8 layers that holds the recipe
_WHOLE = "Use engine='torchao', or THDDDPStrategy, which keeps weights whole."


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """The names of layers that ``convert_linear`` converted, and the kept layers with the reasons."""

    names: tuple[str, ...] = ()
    kept: dict[str, str] = field(default_factory=dict)


def convert_linear(
    model: nn.Module,
    *,
    recipe: Any = "current",
    engine: str = "te",
    keep: str | Iterable[str] = KEEP,
    convert: Callable[[str, nn.Linear], bool] | None = None,
    min_features: int = 0,
    emulate: bool = False,
) -> Converted:
    """Replace the ``nn.Linear`` layers of ``model`` by FP8 ones that share their weights.

    With Accelerate, Fabric or your own loop, call this before ``prepare``, and run the model inside
    ``fp8_context(model)``. ``THDDataModule`` aligns packs for a converted model.

    Args:
        model: a model with weights in bfloat16 or float32, on any device, including the meta device.
        recipe: a name or an object of the engine, see ``FP8Precision``.
        engine: "te" or "torchao".
        keep: names of layers that are not converted; ``*`` matches any part. A name also matches the end of
            a path, so ``"lm_head"`` keeps ``"model.lm_head"``.
        convert: a function of name and layer, called for layers that nothing else keeps; False keeps a layer.
        min_features: layers with fewer inputs or outputs are kept; below about 1,024 FP8 saves no time.
        emulate: let torchao round to FP8 but multiply in high precision, on any device.

    Raises:
        MisconfigurationException: if the device cannot run the recipe, or the engine would run the model
            wrongly.
        ValueError: if the recipe or engine does not exist, or linear weights have another dtype.
    """
    keep = (keep,) if isinstance(keep, str) else tuple(keep)
    min_features = whole_number(min_features, "min_features")
    resolved = resolve(recipe, engine, emulate=emulate)
    check_device(resolved, device_of(model))
    check_weights(model)
    return replace_layers(model, resolved, keep=keep, convert=convert, min_features=min_features)


def replace_layers(
    model: nn.Module,
    recipe: Recipe,
    *,
    keep: tuple[str, ...],
    convert: Callable[[str, nn.Linear], bool] | None = None,
    min_features: int = 0,
) -> Converted:
    """Replace the linear layers of a model by FP8 layers of a resolved recipe."""
    check_model(model, recipe)
    if recipe.engine == "torchao" and not recipe.emulate:
        _patch_inductor()

    names: list[str] = []
    kept: dict[str, str] = {}
    replacements: dict[int, nn.Module] = {}  # by the id of the layer that was replaced
    # A list, because the loop changes the modules that it goes through; without the model itself.
    for name, child in list(model.named_modules(remove_duplicate=False))[1:]:
        path, _, child_name = name.rpartition(".")
        if id(child) in replacements:  # a layer under two names stays one layer
            setattr(model.get_submodule(path), child_name, replacements[id(child)])
            continue
        reason = _reason(name, child, recipe, keep, convert, min_features)
        if reason is None and isinstance(child, nn.Linear):
            replacement = _replacement(child, recipe)
            replacements[id(child)] = replacement
            setattr(model.get_submodule(path), child_name, replacement)
            names.append(name)
        elif reason:
            kept[name] = reason

    if isinstance(model, nn.Linear):
        kept[""] = "is the model itself, which cannot be replaced in place"
    model.__dict__[_MARK] = recipe
    model.__dict__[f"{_MARK}_kept"] = kept
    rank_zero_info(
        f"FP8: {len(names)} layers of {type(model).__name__} multiply in {recipe.engine} {recipe.name!r}, "
        f"{len(kept)} stay: fp8_report(model) lists them with the reasons."
    )
    return Converted(names=tuple(names), kept=kept)


def fp8_context(model: nn.Module, *, group: Any = None) -> AbstractContextManager[Any]:
    """Return the context in which a converted model runs forward; torchao needs none and gets an empty one.

    ``model`` may wrap the converted model. With delayed scaling, the ranks of ``group`` (None: all) share
    statistics, unless the recipe is ``DelayedScaling(reduce_amax=False)``.
    """
    recipe = recipe_of(model)
    if recipe is None or recipe.engine != "te":
        return nullcontext()
    return autocast(recipe, group)


def in_low_precision(
    loss_fn: Callable[[nn.Module, Any], torch.Tensor], model: nn.Module, *, group: Any = None
) -> Callable[[nn.Module, Any], torch.Tensor]:
    """Wrap a loss function to run in Transformer Engine's region, if that engine converted the model."""
    recipe = recipe_of(model)
    if recipe is None or recipe.engine != "te":
        return loss_fn
    check_whole(model, recipe)
    policy, _ = checkpointing(model)
    if policy != "none":
        raise ValueError(
            "A model in Transformer Engine's FP8 would recompute checkpointed activations in bf16 in this "
            "loop. Use Lightning's Trainer with FP8Precision, or engine='torchao', or no checkpointing."
        )

    def run(called: nn.Module, batch: Any) -> torch.Tensor:
        # An evaluation updates no statistics, so it needs no collective.
        with autocast(recipe, group if torch.is_grad_enabled() else None):
            return loss_fn(called, batch)

    return run


def _replacement(child: nn.Linear, recipe: Recipe) -> nn.Module:
    """Return an FP8 layer with the parameters, hooks and mode of a linear layer."""
    layer = _make_linear(child, recipe)
    layer.training = child.training
    attributes = vars(child)
    for name in attributes_of_hooks():
        if attributes.get(name) not in (None, {}):
            layer.__dict__[name] = attributes[name]
    layer.__dict__[_MARK] = recipe
    return layer


def _make_linear(child: nn.Linear, recipe: Recipe) -> nn.Module:
    """Make the engine's layer on the parameters of a linear layer."""
    layer: nn.Module
    if recipe.engine == "torchao":
        module = require("torchao.float8.float8_linear", feature="engine='torchao'")
        layer = module.Float8Linear.from_float(child, config=recipe.config)
        return layer

    engine = require("transformer_engine.pytorch", feature="engine='te'")
    layer = _without_extra_state(engine.Linear)(
        child.in_features,
        child.out_features,
        bias=child.bias is not None,
        params_dtype=child.weight.dtype,
        device="meta",  # so that no second weight is allocated
    )
    layer.weight = child.weight
    if child.bias is not None:
        layer.bias = child.bias
    return layer


@cache
def _without_extra_state(linear: type[nn.Module]) -> type[nn.Module]:
    """Return the engine's layer with the state of ``nn.Linear``, so that both load each other's checkpoints.

    The engine's extra state is empty, except for delayed scaling: there it is a pickle of statistics, which
    the engine refuses to load. ``FP8Precision`` keeps those statistics as tensors.
    """
    plain = {name: getattr(nn.Module, name) for name in ("get_extra_state", "set_extra_state")}
    return type(linear.__name__, (linear,), {"__module__": linear.__module__, **plain})


def is_converted(module: nn.Module) -> bool:
    """Return whether a layer multiplies in FP8, by this package's conversion or an engine's own."""
    # An engine that was never imported has made no layer, and its import takes seconds.
    te = sys.modules.get("transformer_engine.pytorch")
    if te is not None and isinstance(module, te.Linear):
        return True
    torchao = sys.modules.get("torchao.float8.float8_linear")
    return torchao is not None and isinstance(module, torchao.Float8Linear)


def autocast(recipe: Recipe, group: Any = None) -> AbstractContextManager[Any]:
    """Return Transformer Engine's low-precision region, to be entered."""
    engine = require("transformer_engine.pytorch", feature="engine='te'")
    region: AbstractContextManager[Any] = engine.autocast(
        enabled=True, recipe=recipe.config, amax_reduction_group=group
    )
    return region


def _patch_inductor() -> None:
    """Apply torchao's workaround for a Triton bug, as torchao's own conversion does."""
    engine = require("torchao.float8", feature="engine='torchao'")
    engine.convert_to_float8_training(nn.Identity())  # converts nothing, but begins with the workaround


def _reason(
    name: str,
    child: nn.Module,
    recipe: Recipe,
    keep: tuple[str, ...],
    convert: Callable[[str, nn.Linear], bool] | None,
    min_features: int,
) -> str | None:
    """Return why a layer stays; None if it is to be converted, "" if it has no products of weights."""
    if is_converted(child):
        return "multiplies in FP8 already"
    if not isinstance(child, nn.Linear):
        return product_reason(child)
    for pattern in keep:
        if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}"):
            return f"keep={pattern!r}"

    if hasattr(child, "parametrizations") or "weight" not in child._parameters:  # as pruning leaves a layer
        return "has a parametrization, which the replacement would not apply"
    if type(child) is not nn.Linear:
        return f"is a {type(child).__name__}, not a plain nn.Linear"
    if "forward" in child.__dict__:
        return "has a forward of its own, patched onto the layer"

    inputs = child.in_features
    outputs = child.out_features
    if inputs % recipe.features or outputs % recipe.features:
        return f"has {inputs} inputs and {outputs} outputs, not multiples of {recipe.features}"
    if min(inputs, outputs) < min_features:
        return f"has {min(inputs, outputs)} features, fewer than min_features={min_features}"

    if convert is not None and not convert(name, child):
        return "convert= returned False"
    return None


def product_reason(child: nn.Module) -> str:
    """Return why a layer with products of weights but without ``nn.Linear`` stays; "" for other modules."""
    if type(child).__name__ == "Conv1D":
        return "is a transformers Conv1D, not an nn.Linear"
    if any(parameter.dim() == 3 for parameter in child.parameters(recurse=False)):
        return "holds the weights of experts in one tensor, run by grouped products"
    return ""


def check_model(module: nn.Module, recipe: Recipe) -> None:
    """Refuse layers of Transformer Engine in the model, and sharded weights with a recipe of that engine."""
    layers = [
        name
        for name, child in module.named_modules()
        if any(cls.__module__.startswith("transformer_engine.") for cls in type(child).__mro__)
    ]
    if layers:
        raise MisconfigurationException(
            f"{type(module).__name__} has Transformer Engine layers already ({_few(layers)}). Build it with "
            "torch.nn.Linear, or keep your layers and enter transformer_engine.pytorch.autocast yourself."
        )
    check_whole(module, recipe)


def check_whole(module: nn.Module, recipe: Recipe) -> None:
    """Refuse sharded weights (DTensor) with Transformer Engine."""
    sharded = [name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]
    if recipe.engine == "te" and sharded:
        raise MisconfigurationException(
            f"engine='te' with weights sharded by FSDP2 or tensor parallelism ({_few(sharded)}) is not "
            f"tested. {_WHOLE}"
        )


def check_strategy(strategy: object, recipe: Recipe) -> None:
    """Refuse a strategy that will shard the weights of Transformer Engine's layers."""
    if recipe.engine == "te" and isinstance(strategy, (ModelParallelStrategy, FSDPStrategy)):
        raise MisconfigurationException(
            f"engine='te' with {type(strategy).__name__}, which shards the weights by FSDP or tensor "
            f"parallelism, is not tested. {_WHOLE}"
        )


def check_weights(module: nn.Module) -> None:
    """Refuse weights of linear layers in a dtype other than bfloat16 and float32, such as float16."""
    for name, child in module.named_modules():
        if isinstance(child, nn.Linear) and child.weight.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"{name}.weight is {child.weight.dtype}: FP8 takes weights in torch.bfloat16 or torch.float32"
                ". Load the checkpoint in one of them: a cast does not restore the range that float16 lost."
            )


def device_of(module: nn.Module) -> torch.device:
    """Return the GPU of a module, or the GPU that it will move to, or the CPU if there is no GPU."""
    parameter = next(iter(module.parameters()), None)
    if parameter is not None and parameter.is_cuda:
        return parameter.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
