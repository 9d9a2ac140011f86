"""A prepared model with activation checkpoints -> the same model, whose layer inputs wait in CPU memory.

A checkpointed layer keeps its input, ``[1, T, H]``, until its backward pass. Here the input is copied to
pinned CPU memory on a side stream while the next layers run. The backward pass of a layer starts the way back
of the input of the layer before. Inputs on a CPU stay where they are.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_thd._checks import flags
from lightning_thd._find import checkpoint_of, set_checkpoint

_OFFLOAD: Final = "_thd_offload"  # the attribute of a model whose layer inputs wait in CPU memory


def offload_inputs(models: Iterable[nn.Module], offload: bool | None) -> None:
    """Let the inputs of checkpointed layers wait in CPU memory; None keeps what an earlier call has set.

    Raises:
        ValueError: if no layer is checkpointed, or an earlier call has chosen otherwise.
        TypeError: if ``offload`` is no bool and not None.
    """
    if offload is not None:
        flags(offload=offload)

    for model in models:
        earlier = model.__dict__.get(_OFFLOAD)
        if offload is False and earlier:
            raise ValueError(
                f"offload=False, but {type(model).__name__} already keeps its layer inputs in CPU memory. "
                "Leave it out, or build the model again."
            )
        if offload or earlier:
            _wrap_checkpoints(model, required=bool(offload))
            model.__dict__[_OFFLOAD] = True


def offloads(module: nn.Module | None) -> bool:
    """Return whether a model in a module keeps its layer inputs in CPU memory."""
    modules = () if module is None else module.modules()
    return any(child.__dict__.get(_OFFLOAD, False) for child in modules)


def _wrap_checkpoints(model: nn.Module, *, required: bool) -> None:
    """Put the copies into the checkpoint of every layer that has one; all layers share one side stream."""
    layers = [child for child in model.modules() if checkpoint_of(child) is not None]
    if required and not layers:
        raise ValueError(
            "offload=True moves the inputs of checkpointed layers, but "
            f"{type(model).__name__} has none. Call model.gradient_checkpointing_enable() first."
        )

    way: _Way | None = None
    for layer in layers:
        # ``carry_packs`` has wrapped the checkpoint function; this one goes inside.
        carried: functools.partial[Any] = checkpoint_of(layer)
        inside, *rest = carried.args
        if isinstance(inside, functools.partial) and inside.func is _checkpoint_from_host:
            way = inside.args[0]
            continue
        way = way or _Way()
        wrapped = functools.partial(_checkpoint_from_host, way, inside)
        set_checkpoint(layer, functools.partial(carried.func, wrapped, *rest, **carried.keywords))


class _Way:
    """The side stream of a model's copies, and the input that was sent last."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self.last: weakref.ref[_Sent] | None = None

    def stream(self, device: torch.device) -> Any:
        """Return the side stream of a device."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def __reduce__(self) -> Any:
        """Copy and pickle the way without streams, which belong to a process."""
        return _Way, ()


class _Sent:
    """A layer's input in pinned CPU memory, and on its way back once it is asked for."""

    def __init__(self, tensor: Tensor, way: _Way) -> None:
        self._device = tensor.device
        self._way = way
        self._previous = way.last
        way.last = weakref.ref(self)
        self._host = _pinned(tensor)
        self._back: Tensor | None = None
        side = way.stream(tensor.device)
        side.wait_stream(torch.cuda.current_stream(tensor.device))

        with torch.cuda.stream(side):
            self._host.copy_(tensor, non_blocking=True)

        tensor.record_stream(side)

    def fetch(self) -> None:
        """Start the copy to the device."""
        if self._back is None:
            with torch.cuda.stream(self._way.stream(self._device)):
                self._back = torch.empty_like(self._host, device=self._device, pin_memory=False)
                self._back.copy_(self._host, non_blocking=True)

    def take(self) -> Tensor:
        """Return the input on the device, and start the way back of the one before it."""
        self.fetch()
        back = self._back
        self._back = None
        assert back is not None
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._way.stream(self._device))
        back.record_stream(current)

        previous = None if self._previous is None else self._previous()
        if previous is not None:
            previous.fetch()
        return back


def _pinned(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


def _checkpoint_from_host(
    way: _Way, checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a checkpointed layer, whose first argument is its input, and send the input to CPU memory."""
    hidden = args[0] if args else None
    moves = isinstance(hidden, Tensor) and _is_on_device(hidden) and torch.is_grad_enabled()
    if not moves or torch.compiler.is_compiling():
        return checkpoint(function, *args, **kwargs)

    assert isinstance(hidden, Tensor)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "prepare(offload=True) copies layer inputs to CPU memory, which a CUDA graph cannot hold. Build "
            "the model without offload, or leave CUDAGraphCallback out."
        )

    address = hidden.data_ptr()
    shape = hidden.shape

    def pack(tensor: Tensor) -> Any:
        if tensor.data_ptr() == address and tensor.shape == shape:
            return _Sent(tensor.detach(), way)
        return tensor

    def unpack(packed: Any) -> Tensor:
        tensor: Tensor = packed.take() if isinstance(packed, _Sent) else packed
        return tensor

    with saved_tensors_hooks(pack, unpack):
        return checkpoint(function, *args, **kwargs)


def _is_on_device(tensor: Tensor) -> bool:
    return tensor.is_cuda
