"""Embeddings of padding that are exactly zero -> tiny ones, whose gradient is finite.

Gemma3n takes the root of a token's mean square. At a zero embedding, which its padding token has from the
start, the root's gradient is infinite, and times the zero that a trailing pad hands back it is NaN in every
weight.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_thd.models.pack import current_scope

# Its square is far above the smallest number of float32 and bfloat16, and far below every epsilon of a norm.
_TINY = 1e-12
_TINY_HALF = 2.0**-11  # of float16: the square is one of its smallest numbers


def adopt_zero_embeddings(model_class: type) -> None:
    """Patch the embeddings of Gemma3n and its kind, whose zero rows for padding give NaN gradients."""
    for base in model_class.__mro__:
        module = sys.modules.get(base.__module__)
        names = [] if module is None else list(vars(module))
        if any(name.endswith("AltUp") for name in names):
            for name in names:
                cls: Any = getattr(module, name)
                if name.endswith("ScaledWordEmbedding") and not hasattr(cls.forward, "_thd_nonzero"):
                    cls.forward = _nonzero(cls.forward)


def _nonzero(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def forward_in_pack(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = forward(self, input_ids, *args, **kwargs)
        scope = current_scope()
        if scope is None or scope.pack is None or self.padding_idx is None:
            return output
        tiny = _TINY_HALF if output.dtype == torch.float16 else _TINY
        padding = (input_ids == self.padding_idx)[..., None]
        return torch.where(padding & (output == 0), tiny, output)

    forward_in_pack._thd_nonzero = True  # type: ignore[attr-defined]
    return forward_in_pack
