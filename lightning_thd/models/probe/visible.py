"""A model -> the same model with what would hide a leak undone: weights of zero, averages of training alone.

A layer whose output projection is zero, as many are when training begins, lets everything pass and shows
nothing; a batch norm averages over all sequences of a pack, but not in ``eval()``.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
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
