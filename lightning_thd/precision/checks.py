"""A recipe, a device and a model -> an error before the first step, which says what to do."""

from __future__ import annotations

import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_thd._checks import whole_number
from lightning_thd.precision.recipes import Recipe

_ELSE = "Train in bf16 (Trainer(precision='bf16-true')), or try FP8 on any device with engine='torchao', "
_EMULATE = _ELSE + "emulate=True, which rounds to FP8 and gains no time."


def check_device(recipe: Recipe, device: torch.device) -> None:
    """Refuse a device that cannot multiply in the recipe's format.

    Raises:
        MisconfigurationException: for a device that is no GPU, too old, or not served, and an old CUDA.
    """
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
    if capability < recipe.capability:
        raise MisconfigurationException(
            f"{name} has compute capability {_dotted(capability)}; recipe={recipe.name!r} needs "
            f"{_dotted(recipe.capability)}. {_other(capability)}"
        )
    if recipe.below is not None and capability >= recipe.below:
        raise MisconfigurationException(
            f"{name} has compute capability {_dotted(capability)}; Transformer Engine has no "
            f"{recipe.name!r} products from {_dotted(recipe.below)} on. {_other(capability)}"
        )
    cuda = tuple(int(part) for part in str(torch.version.cuda or "0.0").split(".")[:2])
    if cuda < recipe.cuda:
        raise MisconfigurationException(
            f"recipe={recipe.name!r} needs CUDA {_dotted(recipe.cuda)}; this torch was built for "
            f"{torch.version.cuda}. Install a newer build of torch, or use recipe='current'."
        )


def check_model(module: nn.Module, recipe: Recipe) -> None:
    """Refuse a model that an FP8 engine would compute wrongly or not at all.

    Raises:
        MisconfigurationException: for layers of Transformer Engine, and with it sharded (DTensor) weights.
    """
    layers = [name for name, child in module.named_modules() if is_te_layer(child)]
    if layers:
        raise MisconfigurationException(
            f"{type(module).__name__} has Transformer Engine layers already ({_few(layers)}). Build it with "
            "torch.nn.Linear, or keep your layers and enter transformer_engine.pytorch.autocast yourself."
        )
    check_whole(module, recipe)


def check_whole(module: nn.Module, recipe: Recipe) -> None:
    """Refuse sharded weights (DTensor) with Transformer Engine, before or after conversion.

    Raises:
        MisconfigurationException: naming some of them.
    """
    sharded = [name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]
    if recipe.engine == "te" and sharded:
        raise MisconfigurationException(
            f"engine='te' with weights sharded by FSDP2 or tensor parallelism ({_few(sharded)}) is not "
            f"tested. {_WHOLE}"
        )


def check_strategy(strategy: object, recipe: Recipe) -> None:
    """Refuse a strategy that will shard the weights of Transformer Engine's layers.

    Raises:
        MisconfigurationException: for strategies of FSDP and tensor parallelism.
    """
    if recipe.engine == "te" and isinstance(strategy, (ModelParallelStrategy, FSDPStrategy)):
        raise MisconfigurationException(
            f"engine='te' with {type(strategy).__name__}, which shards the weights by FSDP or tensor "
            f"parallelism, is not tested. {_WHOLE}"
        )


_WHOLE = "Use engine='torchao', or THDDDPStrategy, which keeps weights whole."


def check_dtype(dtype: torch.dtype) -> None:
    """Refuse a dtype of weights other than bfloat16 and float32.

    Raises:
        ValueError: for any dtype but bfloat16 and float32.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"weights_dtype={dtype} does not go with FP8: use torch.bfloat16, or torch.float32 for weights "
            "in full precision."
        )


def check_selection(keep: tuple[object, ...], convert: object, min_features: object, emulate: object) -> None:
    """Check the arguments that choose which layers are converted.

    Raises:
        TypeError: for patterns that are no text, a ``convert`` that cannot be called, and other types.
        ValueError: for a negative ``min_features``.
    """
    if not all(isinstance(one, str) for one in keep):
        raise TypeError(f"keep={keep!r}; wanted names of layers, such as ('lm_head', '*router*').")
    if convert is not None and not callable(convert):
        raise TypeError(f"convert={convert!r}; wanted a function of name and layer, or None.")
    whole_number(min_features, "min_features", advice="0 converts layers of any size.")
    if not isinstance(emulate, bool):
        raise TypeError(f"emulate={emulate!r}; wanted True or False.")


def check_weights(module: nn.Module) -> None:
    """Refuse a model in float16, which neither FP8's scales nor a cast to bfloat16 keep.

    Raises:
        ValueError: naming a weight.
    """
    for name, parameter in module.named_parameters():
        if parameter.dtype == torch.float16:
            raise ValueError(
                f"{name} is torch.float16: FP8 takes weights in torch.bfloat16 or torch.float32. Load the "
                "model in one of them: a cast from float16 would lose digits, or range."
            )


def is_te_layer(module: nn.Module) -> bool:
    """Return whether a module is one of Transformer Engine's."""
    return any(cls.__module__.startswith("transformer_engine.") for cls in type(module).__mro__)


def _other(capability: tuple[int, int]) -> str:
    if capability < (8, 9):
        return _EMULATE
    return "Use recipe='current', which runs from 8.9 on."


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
