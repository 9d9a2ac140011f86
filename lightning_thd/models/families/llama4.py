"""Llama 4's layers without rope -> the same layers, which scale queries by their place in a sequence.

They scale by the slot in the row. transformers adds the length of the cache to the slot, so an empty cache
with negative lengths counts slots from the start of each sequence. T slots in a pack.

Checked with transformers 5.19, 5.23 and 5.24. A layer with a ``floor_scale`` that is not listed is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_thd.models.adapted import Adapter, adapt, kind_of
from lightning_thd.models.families.releases import unknown_layer
from lightning_thd.models.pack import model_pack

LAYERS: Final = frozenset({"Llama4TextAttention"})
# The argument with a layer's cache: since transformers 5.24, and before it.
_CACHE_ARGUMENTS: Final = ("cache", "past_key_values")
_WHAT: Final = "scales queries by their position"


def adapt_layers(model: nn.Module) -> None:
    """Adapt attention that scales queries by position; refuse such attention that is not known."""
    for module in model.modules():
        if kind_of(module, LAYERS):
            if _cache_argument(type(module)) is None:
                raise ValueError(unknown_layer(module, _WHAT, "takes no cache under a known name"))
            if not hasattr(module, "floor_scale"):
                raise ValueError(unknown_layer(module, _WHAT, "has no floor_scale"))
            adapt(module, ScaledBySequence)
        elif hasattr(module, "floor_scale"):
            raise ValueError(unknown_layer(module, _WHAT, "is not among the layers that were checked"))


def _cache_argument(layer: Any) -> str | None:
    names = inspect.signature(layer.forward).parameters
    return next((name for name in _CACHE_ARGUMENTS if name in names), None)


class ScaledBySequence(Adapter):
    """The adapter of attention that scales queries by their slot in the row."""

    @classmethod
    def _thd_describe(cls, original: Any) -> dict[str, Any]:
        names = tuple(inspect.signature(original.forward).parameters)[1:]
        return {"_thd_names": names, "_thd_cache": _cache_argument(original)}

    def _thd_run(self: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        pack = model_pack()
        named = {**dict(zip(self._thd_names, args, strict=False)), **kwargs}
        if pack is None or named.get(self._thd_cache) is not None:
            return forward(self, **named)

        slots = torch.arange(pack.slots, device=pack.offsets.device)
        return forward(self, **{**named, self._thd_cache: _CacheOfOffsets(pack.positions - slots)})


class _CacheOfOffsets:
    """An empty cache whose ``lengths`` ``[T]``, added to slot numbers, give positions inside sequences."""

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths

    def get_seq_length(self, *_: Any) -> Tensor:
        return self.lengths

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key, value
