"""A model in eval mode -> the same model as it trains, without dropout; afterwards it is as it was before."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_thd.models.probe_model import BATCH_NORMS

_CONTAINERS = (list, dict, set)
_OF_TORCH = frozenset(vars(nn.Module()))  # what every module has, such as its parameters and hooks
_DROPOUTS = frozenset(
    {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
)


@contextmanager
def as_in_training(model: nn.Module, modes: Mapping[nn.Module, bool], *, most: int) -> Generator[None]:
    """Run the model in training mode inside this context, without dropout, and restore what it keeps.

    ``modes`` are the modes that the model was given in. They are taken if it was training; else all modules
    train. Batch norms stay in eval mode, because the probe reports them by their names. Parameters are
    restored if they have at most ``most`` values.
    """
    was_training = modes.get(model, False)
    now = {module: module.training for module in model.modules()}
    restore = _kept(model, most)
    for module in now:
        module.training = (modes.get(module, True) if was_training else True) and not isinstance(
            module, BATCH_NORMS
        )

    try:
        with _NoDropout():
            yield
    finally:
        restore()
        for module, mode in now.items():
            module.training = mode


def kept_values(model: nn.Module) -> int:
    """Return how many values of buffers ``as_in_training`` copies."""
    return sum(buffer.numel() for buffer in model.buffers())


def _kept(model: nn.Module, most: int) -> Callable[[], None]:
    """Copy buffers, small parameters and plain attributes; return a function that puts them back."""
    size = sum(parameter.numel() for parameter in model.parameters())
    parameters = list(model.parameters()) if size <= most else []
    tensors = {id(tensor): tensor for tensor in (*parameters, *model.buffers())}
    attributes: list[tuple[nn.Module, dict[str, Any], dict[str, Tensor]]] = []
    containers: dict[int, tuple[Any, Any]] = {}
    for module in model.modules():
        plain = {name: value for name, value in vars(module).items() if name not in _OF_TORCH}
        attributes.append((module, plain, dict(module.named_buffers(recurse=False))))
        for value in plain.values():
            if isinstance(value, Tensor):
                tensors[id(value)] = value
            elif type(value) in _CONTAINERS:
                containers[id(value)] = (value, copy.copy(value))

    held = [(tensor, tensor.data) for tensor in tensors.values() if _is_plain(tensor)]
    copies = [data.clone() for _, data in held]

    @torch.no_grad()
    def restore() -> None:
        for module, plain, buffers in attributes:
            for name in [name for name in vars(module) if name not in _OF_TORCH and name not in plain]:
                del module.__dict__[name]
            module.__dict__.update(plain)
            for name, buffer in buffers.items():
                if getattr(module, name) is not buffer:
                    setattr(module, name, buffer)

        for value, content in containers.values():
            if isinstance(value, list):
                value[:] = content
            else:
                value.clear()
                value.update(content)

        for (tensor, data), content in zip(held, copies, strict=True):
            if tensor.data_ptr() != data.data_ptr():
                tensor.data = data
            if not torch.equal(data, content):
                data.copy_(content)

    return restore


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor can be copied and put back."""
    is_strided = type(tensor) in (nn.Parameter, Tensor) and tensor.layout == torch.strided
    return is_strided and not tensor.is_meta and not tensor.is_inference()


class _NoDropout(TorchFunctionMode):
    """Calls torch's dropouts, and those of its attention, with a probability of zero."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS or func is torch.dropout:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:  # q, k, v, mask, dropout
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        elif func is F.multi_head_attention_forward:
            kwargs["training"] = False  # it is read for dropout only
        return func(*args, **kwargs)
