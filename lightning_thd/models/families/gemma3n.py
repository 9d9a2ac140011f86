"""Gemma 3n's word embeddings -> the same, with tiny numbers for the zeros of the padding token.

The padding token has a zero embedding, at which a norm has an infinite gradient. Multiplied by the zero
gradient of a trailing pad, that gives NaN.

Checked with transformers 5.19, 5.23 and 5.24. A model with an ``...AltUp`` and no listed embedding is
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_thd.models.adapted import Adapter, adapt, kind_of
from lightning_thd.models.families.releases import unknown_layer
from lightning_thd.models.pack import model_pack

LAYERS: Final = frozenset({"Gemma3nTextScaledWordEmbedding"})
# The square is far above the smallest positive float32 and bfloat16, and far below the epsilon of a norm.
_TINY = 1e-12
_TINY_HALF = 2.0**-11  # its square, 2**-22, is one of float16's smallest positive numbers


def adapt_layers(model: nn.Module) -> None:
    """Adapt the word embeddings of Gemma 3n."""
    altups = [module for module in model.modules() if type(module).__name__.endswith("AltUp")]
    if not altups:
        return

    embeddings = [module for module in model.modules() if kind_of(module, LAYERS)]
    if not embeddings:
        difference = f"comes without {', '.join(sorted(LAYERS))}"
        raise ValueError(unknown_layer(altups[0], "belongs to Gemma 3n, whose padding is zero", difference))
    for module in embeddings:
        adapt(module, NonzeroEmbedding)


class NonzeroEmbedding(Adapter):
    """The adapter of embeddings with zero rows for padding."""

    def _thd_run(self: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output: Tensor = forward(self, *args, **kwargs)
        if self.padding_idx is None or model_pack() is None:
            return output

        input_ids = args[0] if args else kwargs["input_ids"]
        is_padding = (input_ids == self.padding_idx)[..., None]
        tiny = _TINY_HALF if output.dtype == torch.float16 else _TINY
        return torch.where(is_padding & (output == 0), tiny, output)
