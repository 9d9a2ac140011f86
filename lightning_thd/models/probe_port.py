"""A model and what it was ported from -> the reference's logits, and the first module that differs.

The reference is a module, or a function of one row of token ids. A module whose parameters have the names of
the port's runs with the port's weights, so that only its code is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_thd._checks import described
from lightning_thd.models.probe_model import REACH, first_differing_module, logits_of, undisturbed

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
        self._model, self._reference = model, reference
        self.shares_weights, self.skipped = False, list[str]()
        if not isinstance(reference, nn.Module):
            return
        ours, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
        shapes = {name: x.shape for name, x in ours.items()}
        self.shares_weights = shapes == {name: x.shape for name, x in theirs.items()}
        if not self.shares_weights:
            odd = sorted(set(ours) ^ set(theirs)) or [n for n in ours if ours[n].shape != theirs[n].shape]
            self.skipped.append(
                f"the reference's weights are its own: {odd[0]!r} is not a parameter of both in one shape"
            )

    def logits(self, ids: Tensor) -> Tensor:
        """Return the reference's logits of a row ``[1, L]``, in rows."""
        reference: Any = self._reference
        given: dict[str, Any] = {"input_ids": ids}
        if not isinstance(reference, nn.Module):
            return logits_of(reference(ids))
        if getattr(getattr(reference, "config", None), "use_cache", None) is not None:
            given["use_cache"] = False
        by_name = "input_ids" in signature(reference.forward).parameters
        if not self.shares_weights:
            return logits_of(reference(**given) if by_name else reference(ids))
        weights: dict[str, Tensor] = dict(self._model.named_parameters())
        if by_name:
            return logits_of(functional_call(reference, weights, (), given))
        return logits_of(functional_call(reference, weights, (ids,)))

    @contextmanager
    def undisturbed(self, *, grad: bool) -> Generator[None]:
        """Run the reference in eval mode inside this context, and restore it."""
        is_module = isinstance(self._reference, nn.Module)
        with undisturbed(self._reference, grad=grad) if is_module else nullcontext():  # type: ignore[arg-type]
            yield

    def lengths_to_reach(self, longest: int) -> list[int]:
        """Return a length beyond all windows of both modules below ``REACH``, or no length."""
        sizes = [size for module in self._modules() for size in _window_sizes(module)]
        far = [size for size in sizes if size >= REACH]
        if far:
            self.skipped.append(f"a window of {max(far)} tokens: pass lengths= with a longer sequence")
        near = [size for size in sizes if longest <= size < REACH]
        return [max(near) + 5] if near else []

    def _modules(self) -> list[nn.Module]:
        both = [self._model, *([self._reference] if isinstance(self._reference, nn.Module) else [])]
        return [child for module in both for child in module.modules()]

    def first_module(self, run: Callable[[], Tensor], ids: Tensor) -> str | None:
        """Return the first module whose inputs agree in both and whose outputs differ, if there is one."""
        if not isinstance(self._reference, nn.Module):
            return None
        rows = torch.arange(ids.shape[-1])
        both = self._model, self._reference
        return first_differing_module(both, run, lambda: self.logits(ids), rows, rows, tolerance=1e-5)


def _window_sizes(module: nn.Module) -> list[int]:
    """Return the sizes that a module or its config names as windows."""
    named = dict(vars(module))
    config = getattr(module, "config", None)
    named |= vars(config) if hasattr(config, "__dict__") else {}
    found = []
    for name, value in named.items():
        sizes = value if isinstance(value, list | tuple) else [value]
        if any(part in name for part in _WINDOWS):
            found += [size for size in sizes if type(size) is int and size > 0]
    return found
