"""Tensor subclasses that wrap others, DTensor above all -> the plain tensors that hold the memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensor itself, or those that a subclass wraps: a DTensor gives this rank's shard."""
    wrapper: Any = tensor
    if not is_traceable_wrapper_subclass(wrapper):
        yield tensor
        return
    names, _ = wrapper.__tensor_flatten__()
    for name in names:
        inner = getattr(wrapper, name)
        if isinstance(inner, Tensor):  # a DTensor names its mesh, too
            yield from plain_tensors(inner)


def addresses(tensor: Tensor) -> tuple[int, ...]:
    """Return the addresses of a tensor's memory."""
    if (
        type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    ):  # most are plain, and this runs every step
        return (tensor.data_ptr(),)
    return tuple(x.data_ptr() for x in plain_tensors(tensor))
