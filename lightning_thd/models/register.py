"""The name ``"thd"`` -> entries in transformers' attention and mask tables, made when it is imported."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from lightning_thd.models.import_hook import after_import

NAME = "thd"
_done: set[str] = set()


def register_thd() -> None:
    """Make ``attn_implementation="thd"`` known to transformers, without importing transformers.

    Safe to call any number of times; ``import lightning_thd`` calls it.
    """
    for name, callback in (
        ("transformers.modeling_utils", _register_attention),
        ("transformers.masking_utils", _register_mask),
        ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", _watch_wrappers),
    ):
        if name not in _done:
            _done.add(name)
            after_import(name, callback)


def _register_attention(modeling_utils: ModuleType) -> None:
    from lightning_thd.models.attend import thd_attention

    modeling_utils.AttentionInterface.register(NAME, thd_attention)
    _watch_models(modeling_utils.PreTrainedModel)


def _watch_wrappers(checkpoint_wrapper: ModuleType) -> None:
    """Make torch's CheckpointWrapper, which Lightning's FSDP strategy and others use, carry the pack too."""
    from lightning_thd.models.hooks import carry_scope
    from lightning_thd.models.mixers import has_mixers

    wrapper: Any = checkpoint_wrapper.CheckpointWrapper
    initialize: Callable[..., None] = wrapper.__init__

    @functools.wraps(initialize)
    def __init__(self: Any, mod: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, mod, *args, **kwargs)
        self.checkpoint_fn = carry_scope(self.checkpoint_fn, compilable=not has_mixers(mod))

    wrapper.__init__ = __init__


def _register_mask(masking_utils: ModuleType) -> None:
    from lightning_thd.models.masks import skip_position_scan, thd_mask

    masking_utils.AttentionMaskInterface.register(NAME, thd_mask)
    skip_position_scan(masking_utils)


def _watch_models(base: Any) -> None:
    """Hook every model given "thd" attention, and every activation checkpointing that is switched on."""
    from lightning_thd.models.hooks import carry_scope, install
    from lightning_thd.models.mixers import has_mixers
    from lightning_thd.models.own_attention import picks_attention_from_table, refuse_own_attention

    choose: Callable[..., str] = base.get_correct_attn_implementation
    set_checkpointing: Callable[..., None] = base._set_gradient_checkpointing

    @functools.wraps(choose)
    def get_correct_attn_implementation(self: Any, *args: Any, **kwargs: Any) -> str:
        chosen = choose(self, *args, **kwargs)
        if chosen == NAME and picks_attention_from_table(self):
            return choose(self, None)  # a tower: packs are none of its business
        if chosen == NAME:
            refuse_own_attention(self)
            install(self)
        return chosen

    @functools.wraps(set_checkpointing)
    def _set_gradient_checkpointing(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(set_checkpointing).bind(self, *args, **kwargs)
        bound.apply_defaults()
        bound.arguments["gradient_checkpointing_func"] = carry_scope(
            bound.arguments["gradient_checkpointing_func"], compilable=not has_mixers(self)
        )
        set_checkpointing(*bound.args, **bound.kwargs)

    base.get_correct_attn_implementation = get_correct_attn_implementation
    base._set_gradient_checkpointing = _set_gradient_checkpointing
