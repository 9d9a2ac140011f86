"""A torch module -> the transformers models inside it, and their configs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from types import FunctionType
from typing import Any

from torch import nn

from lightning_thd._private import private_of


def unwrapped(model: Any, *, on_peft: Callable[[Any], None] | None = None) -> Any:
    """Return the model inside DDP, torch.compile and PEFT; ``on_peft`` is called with each PEFT wrapper."""
    while True:
        if is_compiled_wrapper(model):
            model = inside_compiled(model)
        elif hasattr(model, "get_base_model"):
            if on_peft is not None:
                on_peft(model)
            model = model.get_base_model()
        elif _wraps_a_module(model):
            model = model.module
        else:
            return model


def is_compiled_wrapper(model: object) -> bool:
    """Return whether ``torch.compile(module)`` made a module around another one."""
    # By name, because importing the class takes a second and a half, where nothing is compiled.
    return any(base.__name__ == "OptimizedModule" for base in type(model).__mro__)


def inside_compiled(wrapper: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` was given, the only child of its wrapper."""
    (module,) = wrapper.children()
    return module


_CHECKPOINT = "transformers.GradientCheckpointingLayer._gradient_checkpointing_func"


def checkpoint_of(module: nn.Module) -> Any:
    """Return the function by which a layer of transformers is checkpointed; None if it is not.

    Raises:
        PrivateNameGone: if the layer is checkpointed, and the installed release keeps its function elsewhere.
    """
    is_of_transformers = any(base.__module__.startswith("transformers.") for base in type(module).__mro__)
    if vars(module).get("gradient_checkpointing", False) and is_of_transformers:
        return private_of(module, _CHECKPOINT)
    return vars(module).get(_CHECKPOINT.rpartition(".")[2])  # switched off, or none


def set_checkpoint(module: nn.Module, function: Any) -> None:
    """Replace the function by which a layer of transformers is checkpointed."""
    module.__dict__[_CHECKPOINT.rpartition(".")[2]] = function


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called."""
    return private_of(module, "torch.nn.Module._compiled_call_impl") is not None


def holds_compiled_code(module: nn.Module) -> bool:
    """Return whether torch.compile made a part of a module, or a method or function that a part keeps.

    A function of another place that a module calls, such as a global one, is not seen.
    """
    parts = list(module.modules())
    if any(is_compiled_wrapper(part) or is_compiled_in_place(part) for part in parts):
        return True
    classes = {base for part in parts for base in type(part).__mro__}
    values = chain.from_iterable(vars(holder).values() for holder in (*parts, *classes))
    return any(_is_compiled_function(value) for value in values)


def _is_compiled_function(value: object) -> bool:
    """Return whether ``torch.compile(function)`` made a function, by the method that torch gives it."""
    return isinstance(value, FunctionType) and hasattr(value, "get_compiler_config")


def _wraps_a_module(model: Any) -> bool:
    """Return whether a model is a wrapper, such as DDP's, that holds another one as ``module``."""
    is_a_model = hasattr(model, "get_output_embeddings")
    return not is_a_model and isinstance(getattr(model, "module", None), nn.Module)


def has_parameters(module: nn.Module) -> bool:
    """Return whether a module or one of its submodules has parameters."""
    return any(True for _ in module.parameters())


def models_in(module: nn.Module | None) -> Iterator[tuple[str, Any]]:
    """Yield the path and the module of every module with a transformers config, outer modules first."""
    if module is None:
        return
    for name, child in module.named_modules():
        if hasattr(getattr(child, "config", None), "get_text_config"):
            yield name, child


def outermost_models(module: nn.Module | None) -> dict[str, Any]:
    """Return the models that no other model holds, by path; the path of ``module`` itself is ""."""
    if module is None:
        return {}
    models: dict[str, Any] = {}
    for name, child in module.named_modules():  # outer modules come first
        # Accept configs of other packages, because FLOPs are also counted without transformers.
        model_type = getattr(getattr(child, "config", None), "model_type", None)
        is_inside = any(outer == "" or name.startswith(f"{outer}.") for outer in models)
        if model_type and not is_inside:
            models[name] = child
    return models


def recipe_of(module: nn.Module | None) -> Any | None:
    """Return the FP8 recipe with which a model or a layer of it was converted, or None."""
    if module is None:
        return None
    for child in module.modules():
        recipe = child.__dict__.get("_thd_fp8")
        if recipe is not None:
            return recipe
    return None


def model_with_head(module: nn.Module) -> Any | None:
    """Return the outermost model that owns a language model's head, or None."""
    for _, child in models_in(module):
        # Look at the class: a PEFT wrapper has all attributes of the model inside, but its class does not.
        if not hasattr(type(child), "get_output_embeddings"):
            continue
        if isinstance(child.get_output_embeddings(), nn.Module):
            return child
    return None


def model_config(module: nn.Module | None) -> Any | None:
    """Return the transformers config of the first model in a module, or None."""
    return next((model.config for _, model in models_in(module)), None)


def text_config(config: Any) -> Any:
    """Return the config of the language model; in a multimodal config that is the text part."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


# The attributes in which a composite config holds the language model's config. ``get_text_config`` tries the
# same names but is slower: it reads some twenty attributes and copies the config of an encoder-decoder.
TEXT_CONFIGS = frozenset(("decoder", "generator", "text_config"))


@cache
def kind_holds_text_config(kind: Any) -> bool:
    """Return whether a class of transformers configs has an attribute that ``TEXT_CONFIGS`` names."""
    return any(hasattr(kind, name) for name in TEXT_CONFIGS)
