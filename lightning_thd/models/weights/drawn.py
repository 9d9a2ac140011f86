"""A module on the meta device -> the same with memory, and values that depend on a seed and names alone.

Whatever part of a model a rank keeps, a weight gets the values it has in the whole model: each is drawn from
a generator seeded with the job's seed and the weight's name. They are not the values that building the model
on the host gives under that seed, which draws all weights from one stream.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_thd._imports import available


def draw_weights(module: nn.Module, device: torch.device, *, seed: int) -> None:
    """Allocate everything on the meta device and set its initial values, in place.

    Modules of a transformers model are filled by its ``_init_weights``, others by their
    ``reset_parameters()``; buffers such as a rope's frequencies are computed there too.

    Args:
        module: with parameters or buffers on the meta device; others are left as they are.
        device: where they go.
        seed: the same on all ranks.

    Raises:
        ValueError: for what nobody gives values, by name.
    """
    filled = _with_memory(module, device)
    if not filled:
        return
    names = {id(tensor): name for name, tensor in filled.items()}
    kept = [t for t in [*module.parameters(), *module.buffers()] if id(t) not in names]
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.no_grad(), _untouched(kept), _seeded(names, seed):
        _initialise(module, names, seed)
    left = [name for name, tensor in filled.items() if _is_unset(tensor)]
    if left:
        raise ValueError(
            f"{type(module).__name__} holds {left[:4]} on the meta device, and no _init_weights() or "
            "reset_parameters() of the modules that own them gives them values. Write one, or build the "
            "model with its weights."
        )


def _with_memory(module: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Replace what is on the meta device by memory marked as unset; shared tensors stay shared."""
    made: dict[int, Tensor] = {}
    found: dict[str, Tensor] = {}
    for path, child in module.named_modules():
        for held in (child._parameters, child._buffers):
            for name, tensor in held.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = new = _like(tensor, device)
                    found[f"{path}.{name}" if path else name] = new
                held[name] = made[id(tensor)]
    return found


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    data = torch.empty_like(tensor.detach(), device=device)
    if data.dtype != torch.bool:
        data.fill_(_unset(data.dtype))
    if not isinstance(tensor, nn.Parameter):
        return data
    made = nn.Parameter(data, tensor.requires_grad)
    made.__dict__.update({k: v for k, v in vars(tensor).items() if k != "_is_hf_initialized"})
    return made


def _unset(dtype: torch.dtype) -> float | int:
    """Return the value that marks an entry as not set yet: NaN, or the largest integer."""
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


def _is_unset(tensor: Tensor) -> bool:
    if tensor.dtype == torch.bool or not tensor.numel():
        return False
    mark = _unset(tensor.dtype)
    return bool((tensor.isnan() if mark != mark else tensor == mark).any())


def _initialise(module: nn.Module, names: Mapping[int, str], seed: int) -> None:
    """Call the initialiser of every module that owns unset tensors, children before parents."""
    adapters: dict[str, Any] = {}
    owners: Counter[int] = Counter()
    for child in module.modules():
        adapters |= vars(child).get("peft_config") or {}
        owners.update(map(id, child.parameters(recurse=False)))

    def walk(child: nn.Module, path: str, model: Any) -> None:
        unset = [t for t in [*child.parameters(), *child.buffers()] if id(t) in names]
        if not unset:
            return
        own: Any = child if _is_model(child) else model
        added = getattr(child, "adapter_layer_names", ())  # PEFT's, not the model's own
        for name, below in child.named_children():
            walk(below, f"{path}.{name}" if path else name, None if name in added else own)
        torch.manual_seed(_seed_of(f"{path}()", seed))
        if added:
            _initialise_adapters(child, path, adapters)
            return
        if own is not None:  # a block may fill what its children hold
            own._init_weights(child)
        tensors = [*child.parameters(recurse=False), *child.buffers(recurse=False)]
        mine = [tensor for tensor in tensors if id(tensor) in names]
        reset: Any = getattr(child, "reset_parameters", None)
        if reset is not None and any(map(_is_unset, mine)):
            reset()
        for tensor in mine:
            if owners[id(tensor)] > 1:  # an embedding's rows are not the head's to fill again
                tensor._is_hf_initialized = True  # type: ignore[attr-defined]

    walk(module, "", None)


def _initialise_adapters(layer: Any, path: str, configs: Mapping[str, Any]) -> None:
    """Initialise LoRA adapters as their config asks."""
    for name in getattr(layer, "r", ()):
        how = getattr(configs.get(name), "init_lora_weights", None)
        if how is True or how == "gaussian":
            layer.reset_lora_parameters(name, how)
        elif how is not False:  # that leaves what nn.Linear draws
            raise ValueError(
                f"The adapter {name!r} of {path} on the meta device has init_lora_weights={how!r}; True, "
                "False and 'gaussian' need no weights of the model. Build the model in __init__, with its "
                "weights."
            )
    if not hasattr(layer, "reset_lora_parameters") and any(map(_is_unset, layer.parameters())):
        raise ValueError(
            f"{path} ({type(layer).__name__}) was added to a model on the meta device, and only LoRA "
            "adapters are given values there. Build the model in __init__, with its weights."
        )


def _is_model(module: nn.Module) -> bool:
    return hasattr(module, "config") and callable(getattr(type(module), "_init_weights", None))


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextlib.contextmanager
def _untouched(tensors: list[Tensor]) -> Generator[None]:
    """Mark tensors in this context so that transformers' initialisers leave them alone."""
    marked = [tensor for tensor in tensors if not hasattr(tensor, "_is_hf_initialized")]
    for tensor in marked:
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for tensor in marked:
            del tensor._is_hf_initialized  # type: ignore[attr-defined]


@contextlib.contextmanager
def _seeded(names: Mapping[int, str], seed: int) -> Generator[None]:
    """Seed every call that fills a named tensor by that name, inside this context."""
    if not available("transformers"):
        yield
        return
    from transformers import initialization

    before = {name: call for name, call in vars(initialization).items() if _fills(name) and callable(call)}

    def seeded(call: Callable[..., Any]) -> Callable[..., Any]:
        def filling(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if id(tensor) in names:
                torch.manual_seed(_seed_of(names[id(tensor)], seed))
            return call(tensor, *args, **kwargs)

        return filling

    try:
        for name, call in before.items():
            setattr(initialization, name, seeded(call))
        with initialization.guard_torch_init_functions():
            yield
    finally:
        for name, call in before.items():
            setattr(initialization, name, call)


def _fills(name: str) -> bool:
    return name.endswith("_") and not name.startswith("_")
