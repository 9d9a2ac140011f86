"""A model and what it was ported from -> the reference's logits, and the first module that differs.

The reference is a module, or a function of one row of token ids. A module whose parameters have the names of
the port's runs with the port's weights, so that only its code is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from inspect import signature
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_thd._checks import described
from lightning_thd.models.probe_model import (
    REACH,
    first_differing_module,
    logits_of,
    refuse_without_forward,
    undisturbed,
)

Reference: TypeAlias = nn.Module | Callable[[Tensor], Any]

# Parts of the names of attributes that hold how many keys an attention sees.
_WINDOWS = ("window", "chunk_size", "local_attention")


class Port:
    """A port and its reference.

    Attributes:
        shares_weights: whether the reference runs with the port's weights.
        skipped: what is not compared, and why.
    """

    def __init__(self, model: nn.Module, reference: Reference) -> None:
        if not callable(reference):
            raise TypeError(
                f"reference is {described(reference)}; wanted the module that was ported, or a function of "
                "one row of token ids [1, L] that returns logits."
            )

        self._model = model
        self._reference = reference
        self.shares_weights = False
        self.skipped = list[str]()
        if not isinstance(reference, nn.Module):
            return

        refuse_without_forward(reference, "reference")
        port_shapes = {name: weight.shape for name, weight in model.named_parameters()}
        reference_shapes = {name: weight.shape for name, weight in reference.named_parameters()}
        self.shares_weights = port_shapes == reference_shapes
        if not self.shares_weights:
            in_one = sorted(set(port_shapes) ^ set(reference_shapes))
            differing = in_one or [
                name for name, shape in port_shapes.items() if shape != reference_shapes[name]
            ]
            self.skipped.append(
                f"the reference's weights are its own: {differing[0]!r} is not a parameter of both in one "
                "shape"
            )

    def logits(self, ids: Tensor) -> Tensor:
        """Return the reference's logits of a row ``[1, L]``, in rows."""
        reference: Any = self._reference
        if not isinstance(reference, nn.Module):
            return logits_of(reference(ids))

        kwargs: dict[str, Any] = {"input_ids": ids}
        if getattr(getattr(reference, "config", None), "use_cache", None) is not None:
            kwargs["use_cache"] = False

        by_name = "input_ids" in signature(reference.forward).parameters
        if not self.shares_weights:
            return logits_of(reference(**kwargs) if by_name else reference(ids))

        weights: dict[str, Tensor] = dict(self._model.named_parameters())
        if by_name:
            return logits_of(functional_call(reference, weights, (), kwargs))
        return logits_of(functional_call(reference, weights, (ids,)))

    @contextmanager
    def undisturbed(self, *, grad: bool) -> Generator[None]:
        """Run the reference in eval mode inside this context, and restore it."""
        if not isinstance(self._reference, nn.Module):
            yield
            return
        with undisturbed(self._reference, grad=grad):
            yield

    def lengths_to_reach(self, longest: int) -> list[int]:
        """Return a length beyond all windows of both modules below ``REACH``, or no length."""
        sizes = [size for module in self._modules() for size in _window_sizes(module)]
        too_large = [size for size in sizes if size >= REACH]
        if too_large:
            self.skipped.append(f"a window of {max(too_large)} tokens: pass lengths= with a longer sequence")

        within_reach = [size for size in sizes if longest <= size < REACH]
        return [max(within_reach) + 5] if within_reach else []

    def _modules(self) -> list[nn.Module]:
        """List all modules of the port and, if it is a module, of the reference."""
        modules = list(self._model.modules())
        if isinstance(self._reference, nn.Module):
            modules += self._reference.modules()
        return modules

    def first_module(self, run: Callable[[], Tensor], ids: Tensor) -> str | None:
        """Return the first module whose inputs agree in both and whose outputs differ, if there is one."""
        if not isinstance(self._reference, nn.Module):
            return None
        rows = torch.arange(ids.shape[-1])
        models = (self._model, self._reference)
        return first_differing_module(models, run, lambda: self.logits(ids), rows, rows, tolerance=1e-5)


def _window_sizes(module: nn.Module) -> list[int]:
    """Return the sizes that a module or its config names as windows."""
    attributes = dict(vars(module))
    config = getattr(module, "config", None)
    if hasattr(config, "__dict__"):
        attributes |= vars(config)

    sizes: list[int] = []
    for name, value in attributes.items():
        if not any(part in name for part in _WINDOWS):
            continue
        values = value if isinstance(value, list | tuple) else [value]
        sizes += [size for size in values if type(size) is int and size > 0]
    return sizes
