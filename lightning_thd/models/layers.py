"""The layers of a model with "thd" -> the same layers, which handle packs.

``prepare_layers`` runs when a model has been built or switched, in its first call on a pack, and when a loss,
a strategy or the user prepares it. What it did before it leaves as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, cast

import torch
from torch import nn

from lightning_thd._find import checkpoint_of, set_checkpoint
from lightning_thd.models.families.recurrent import has_mixers
from lightning_thd.models.families.registry import adapt_to_family
from lightning_thd.models.masks import learn_masks
from lightning_thd.models.pack import READY, Scope, current_scope, scoped
from lightning_thd.models.refusals import note_construction

_OF_WRAPPER: Final = "checkpoint_fn"  # where torch's CheckpointWrapper keeps its function


def prepare_layers(model: Any) -> None:
    """Adapt the layers of a model, mark them as prepared, and note what its config says now."""
    for module in model.modules():
        module.__dict__[READY] = True
    adapt_to_family(model)
    learn_masks(model)
    note_construction(model)
    carry_packs(model)


# ---- Activation checkpoints


def carry_packs(model: nn.Module) -> None:
    """Make all activation checkpoints of a model recompute their layers on the pack of the first run."""
    for module in model.modules():
        checkpoint = checkpoint_of(module)
        if checkpoint is not None:
            set_checkpoint(module, carry_scope(checkpoint, compilable=not has_mixers(module)))
        checkpoint = module.__dict__.get(_OF_WRAPPER)
        if checkpoint is not None:
            module.__dict__[_OF_WRAPPER] = carry_scope(checkpoint, compilable=not has_mixers(module))


def carry_scope(checkpoint: Callable[..., Any], *, compilable: bool) -> Callable[..., Any]:
    """Wrap an activation checkpoint function so that it recomputes in the scope of its first run.

    The backward pass recomputes after the model has returned, perhaps in another thread. ``compilable`` means
    that torch.compile traces the layers without a graph break. Around others, the wrapper is not traced.
    """
    if isinstance(checkpoint, functools.partial) and checkpoint.func in (_carry, _carry_untraced):
        return checkpoint
    if compilable:
        return functools.partial(_carry, checkpoint)
    return functools.partial(_carry_untraced, checkpoint)


def _carry(checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return checkpoint(function, *args, **kwargs)
    scope = current_scope() or Scope(None, None)  # without a pack, so that no recomputation misses one

    def run(*inputs: Any, **named: Any) -> Any:
        with scoped(scope):
            return function(*inputs, **named)

    return checkpoint(run, *args, **kwargs)


_carry_untraced = cast("Callable[..., Any]", torch.compiler.disable(_carry, recursive=False))  # type: ignore[no-untyped-call]
