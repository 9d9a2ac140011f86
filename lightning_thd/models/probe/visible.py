"""A model -> the same model with what hides a leak, or looks like one, undone: zeros, batch norms, rounding.

A layer whose output projection is zero, as many are when training begins, lets everything pass and shows
nothing; a batch norm averages over all sequences of a pack, but not in ``eval()``.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

_HALF = (torch.bfloat16, torch.float16)
_DTYPES = (torch.float64, torch.float32, *_HALF)
_NOISE = 0.02  # standard deviation, transformers' usual initialisation


@contextmanager
def no_zero_weights(model: nn.Module) -> Generator[None]:
    """Fill parameters that hold nothing but zeros with small noise inside this context.

    Parameters that are cut over ranks stay as they are: the ranks of a group would draw different noise.
    """
    zeros = [parameter for parameter in model.parameters() if _is_zero(parameter)]
    with torch.no_grad():
        for seed, parameter in enumerate(zeros):
            generator = torch.Generator(parameter.device).manual_seed(seed)
            parameter.normal_(0.0, _NOISE, generator=generator)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter in zeros:
                parameter.zero_()


def _is_zero(parameter: Tensor) -> bool:
    if type(parameter) not in (nn.Parameter, Tensor) or parameter.dtype not in _DTYPES:
        return False
    if parameter.device.type == "meta" or parameter.is_inference() or not parameter.numel():
        return False
    return not bool(parameter.detach().any())


def working_dtype(model: nn.Module, logits: Tensor) -> torch.dtype:
    """Return the least precise dtype that a model computes in, whatever it casts its logits to.

    A bf16 model that returns fp32 logits gives bf16, and so does autocast.
    """
    device = logits.device.type
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point() and p.ndim > 1} | {logits.dtype}
    if device != "meta" and torch.is_autocast_enabled(device):
        dtypes.add(torch.get_autocast_dtype(device))
    return min(dtypes, key=lambda dtype: (dtype.itemsize, dtype == torch.float16))


@contextmanager
def in_fp32(model: nn.Module, *, most: int) -> Generator[bool]:
    """Compute in fp32 inside this context: without autocast, half-precision weights held in fp32.

    Args:
        model: the model, whose weights come back to the bit.
        most: parameters that may be held twice.

    Yields:
        Whether the model computes in fp32 now; not where it did before, is larger, or is cut over ranks.
    """
    tensors = [*model.parameters(), *model.buffers()]
    halves = [tensor for tensor in tensors if tensor.dtype in _HALF]
    devices = {tensor.device.type for tensor in tensors} - {"meta"}
    plain = all(type(x) in (nn.Parameter, Tensor) and not (x.is_meta or x.is_inference()) for x in halves)
    rounded = bool(halves) or any(torch.is_autocast_enabled(device) for device in devices)
    if not rounded or not plain or sum(tensor.numel() for tensor in halves) > most:
        yield False
        return
    held, default = [tensor.data for tensor in halves], torch.get_default_dtype()
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        try:
            torch.set_default_dtype(torch.float32)  # Lightning's "bf16-true" sets another
            for tensor in halves:
                tensor.data = tensor.data.float()
            yield True
        finally:
            torch.set_default_dtype(default)
            for tensor, data in zip(halves, held, strict=True):
                tensor.data = data


class BatchNorms:
    """Batch norms of a model that average over their input in training, and those of them that ran."""

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[nn.Module, str] = {
            module: name
            for name, module in model.named_modules()
            if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
        }
        self.ran: list[str] = []

    @contextmanager
    def watched(self) -> Generator[None]:
        """Note which of them run inside this context."""
        handles = [module.register_forward_pre_hook(self._note) for module in self._names]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, module: nn.Module, _: object) -> None:
        if (name := self._names[module]) not in self.ran:
            self.ran.append(name)
