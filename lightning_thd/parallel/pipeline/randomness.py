"""Dropout in a pipeline -> the same numbers whichever rank holds a layer: each layer has its own stream.

Ranks that were seeded alike would else give the first layers of all stages the same masks. Every place among
the layers, a boundary too, takes one number from the global stream, so what a user draws in ``training_step``
stays the same on all ranks; a layer that is computed again in the backward pass sees the same number again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_thd.parallel.draws import restore, states


def has_dropout(model: Any) -> bool:
    """Return whether a model has dropout: in one of its modules, or as an option of its config."""
    if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in model.modules()):
        return True
    options = model.config.get_text_config(decoder=True).to_dict().items()
    return any("drop" in name and isinstance(p, float) and p > 0 for name, p in options)


def draw_from_own_stream(layer: nn.Module, index: int) -> None:
    """Let a layer draw from a random stream seeded by its index and the global stream, in place."""
    saved: list[list[torch.Tensor]] = []

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        number = take_number()
        saved.append(states())
        torch.manual_seed((number + 0x9E3779B97F4A7C15 * (index + 1)) % 2**63)  # the golden ratio's bits

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        restore(saved.pop())

    layer.register_forward_pre_hook(enter)
    layer.register_forward_hook(leave, always_call=True)


def take_number() -> int:
    """Draw one number from the host's global random stream, as each layer's place does."""
    return int(torch.empty((), dtype=torch.int64).random_())
