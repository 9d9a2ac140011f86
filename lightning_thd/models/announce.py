"""A transformers model with "thd" attention -> the same model, which announces each pack to its layers.

``watch_models`` patches ``PreTrainedModel``. A model that is built with "thd" or switched to it gets two
hooks, ``enter`` and ``leave``. The forward of every model class gets a guard. The hooks find the pack in
the arguments of a call, or take the batch that a loss has announced. The guard sees what the hooks miss. It
announces the pack of ``model.forward(...)``. It refuses a model whose config was switched to "thd" by hand,
and one without "thd" that gets labels or pools its output while a model inside it gets a pack.
Hooks are functions of this module, so that a model that carries them can be copied, pickled and compiled.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import nn

from lightning_thd._find import TEXT_CONFIGS, kind_holds_text_config
from lightning_thd._patches import patch
from lightning_thd._versions import warn_of_newer
from lightning_thd.models.masks import learn_window
from lightning_thd.models.mixers import adopt_mixers, has_mixers
from lightning_thd.models.pack import (
    BOUNDARIES,
    PACK_KWARGS,
    STATE,
    Caller,
    Pack,
    Scope,
    current_scope,
    find_pack,
    packed,
    scoped,
)
from lightning_thd.models.pooled_heads import (
    adopt_classifier,
    class_pools,
    pool_each_sequence,
    refuse_pooled_pack,
)
from lightning_thd.models.positions import (
    adopt_position_tables,
    adopt_ropes,
    adopt_row_scales,
    adopt_zero_embeddings,
    keep_frequencies,
)
from lightning_thd.models.refusals import (
    LABELS,
    keep_labels_inside,
    keeps_own_attention,
    note_construction,
    refuse_call,
    refuse_changed_config,
    refuse_own_attention,
    refuse_unknown_layers,
)
from lightning_thd.models.towers import adopt_tower

if TYPE_CHECKING:
    from lightning_thd.batch import THDBatch

NAME: Final = "thd"
_OF_PACKS: Final = ("cu_seq_lens_q", BOUNDARIES)
# Hooked models by ``id``, for ``_reason_of``; a copy of a model is missing until ``adopt`` adds it.
_MODELS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
# Class names of all models ever hooked. While the set is empty, the guard need not watch other models.
_HOOKED: set[str] = set()


# ---- Models that get "thd"


def watch_models(base: Any) -> None:
    """Hook every model that is built with "thd" or switched to it, and guard every model class."""
    set_checkpointing = _carrying_checkpoints(base)
    choose: Callable[..., str] = base.get_correct_attn_implementation
    switch: Callable[..., None] = base.set_attn_implementation
    finish: Callable[..., None] = base.post_init
    restore: Callable[..., None] = base.__setstate__

    @functools.wraps(choose)
    def get_correct_attn_implementation(self: Any, *args: Any, **kwargs: Any) -> str:
        chosen = choose(self, *args, **kwargs)
        if chosen == NAME and keeps_own_attention(self):
            chosen = choose(self, None)  # a vision tower whose attention has no "thd"
        elif chosen == NAME:
            refuse_own_attention(self)
            install(self)
        guard(type(self))
        return chosen

    @functools.wraps(switch)
    def set_attn_implementation(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        named = isinstance(attn_implementation, dict)
        asked = attn_implementation.get("") if named else attn_implementation
        switch(self, attn_implementation, *args, **kwargs)
        if asked == NAME:  # transformers only logs that it cannot switch a class
            self.config._attn_implementation_internal = self.get_correct_attn_implementation(NAME)
        _spread_thd(self, follow=asked is None)

    @functools.wraps(finish)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        finish(self, *args, **kwargs)
        note_construction(self)
        if _mentions_thd(self.config):
            _spread_thd(self, follow=False)

    @functools.wraps(restore)
    def __setstate__(self: Any, state: Any) -> None:
        restore(self, state)
        if getattr(self, "_thd_installed", False):
            adopt(self)
        guard(type(self))  # around what ``adopt`` has patched

    patch("attention chosen", base, "get_correct_attn_implementation", get_correct_attn_implementation)
    patch("attention chosen", base, "set_attn_implementation", set_attn_implementation)
    patch("attention chosen", base, "post_init", post_init)
    patch("copies", base, "__setstate__", __setstate__)
    patch("checkpoints", base, "_set_gradient_checkpointing", set_checkpointing)
    waiting = list(base.__subclasses__())  # classes that were imported before this package
    while waiting:
        model_class = waiting.pop()
        waiting.extend(model_class.__subclasses__())
        if "forward" in vars(model_class):
            guard(model_class)


def install(model: Any) -> None:
    """Hook ``model``, a PreTrainedModel under construction or finished, so that it announces its packs."""
    if getattr(model, "_thd_installed", False):
        return
    warn_of_newer()
    model._thd_installed = True
    note_construction(model)
    names = _parameter_names(type(model))
    model._thd_takes_use_cache = "use_cache" in inspect.signature(type(model).forward).parameters
    model._thd_parameters = names
    model._thd_takes_decoder = not names or any(name.startswith("decoder_") for name in names)
    adopt(model)
    model.register_forward_pre_hook(enter, with_kwargs=True)
    # ``leave`` must run even if forward raises, or the scope left behind would be used for the next batch.
    model.register_forward_hook(leave, always_call=True)


def adopt(model: Any) -> None:
    """Patch the classes of a hooked model's layers to handle packs, once each, and prepare the model.

    A pickled model brings its hooks along, but not the patches of classes: ``__setstate__`` calls this.
    """
    model._thd_checked = False
    _MODELS[id(model)] = model
    _HOOKED.add(type(model).__name__)
    model._thd_pools = class_pools(type(model))
    model._thd_own_class = not type(model).__module__.startswith("transformers.")
    model.warn_if_padding_and_no_attention_mask = _warn_of_no_padding
    adopt_tower(type(model))
    adopt_mixers(type(model))
    adopt_position_tables(type(model))
    adopt_row_scales(type(model))
    adopt_ropes(type(model), model.config)
    adopt_zero_embeddings(type(model))
    adopt_classifier(type(model))
    learn_window(model.config)


def _warn_of_no_padding(input_ids: Any, attention_mask: Any) -> None:
    """Replace transformers' warning of padding ids without a mask, which would read the device."""


def _spread_thd(model: nn.Module, *, follow: bool) -> None:
    """Set "thd" on every model around a language model with "thd".

    If the language model has lost "thd", ``follow`` gives its new attention to the outer models. Without
    ``follow`` they keep the "thd" that was asked for by name.
    """
    inside: list[Any] = [x for x in model.modules() if hasattr(type(x), "get_correct_attn_implementation")]
    for inner in reversed(inside):
        own, text = inner.config._attn_implementation, _language_config(inner.config)._attn_implementation
        wanted = text if text == NAME or follow else own
        if NAME in (own, wanted) and not keeps_own_attention(inner):
            chosen = inner.get_correct_attn_implementation(wanted)
            inner.config._attn_implementation_internal = chosen


def _language_config(config: Any) -> Any:
    if not _mentions_thd(config):  # get_text_config() is slow if one config has an encoder and a decoder
        return config
    try:
        return config.get_text_config(decoder=True)
    except ValueError:  # several language models
        return config


def _mentions_thd(config: Any) -> bool:
    if config._attn_implementation == NAME:
        return True
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if hasattr(inner, "sub_configs") and _mentions_thd(inner):
            return True
    return False


# ---- A call of a model with "thd"


def enter(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Find the pack in a model's arguments, check it, and push it on the stack of running models."""
    config = model.config
    if config._attn_implementation != NAME:  # switched, or changed by another model with the same config
        _refuse_pack(model, kwargs.get("cu_seq_lens_q"))
        return None
    outer: Scope | None = getattr(STATE, "scope", None)
    if outer is None and getattr(model, "_thd_packs_rows", False) and kwargs.keys().isdisjoint(_OF_PACKS):
        return None  # the model's forward decides what becomes a pack: see run_as_pack
    # Name positional arguments. If the first is a batch, the call runs a whole training step: keep them.
    if args and isinstance(args[0], torch.Tensor | None):
        named = _by_name(model._thd_parameters, args, kwargs)
        args, kwargs = ((), named) if named is not None else (args, kwargs)
    if outer is not None and outer.families:
        families, masks = outer.families, outer.masks  # an outer model may pass its masks to an inner model
        embeds = kwargs.get("inputs_embeds")
        # An inner model that gets embeddings of all slots is a part of the language model: it keeps the pack.
        continues = embeds is not None and outer.pack is not None and embeds.shape[1] == outer.pack.slots
        if type(config) not in families and not continues:
            STATE.scope = Scope(None, outer, module=model, families=families)
            return args, {k: value for k, value in kwargs.items() if k not in PACK_KWARGS}
        text = None
    else:
        kind: Any = type(config)
        plain = not torch.compiler.is_compiling() and not kind_holds_text_config(kind)
        plain = plain and TEXT_CONFIGS.isdisjoint(vars(config))
        text = config if plain else config.get_text_config(decoder=True)
        families, masks = (type(config), type(text)), ()
    pack: Pack | None = kwargs.get(BOUNDARIES)
    inner = text is None and kwargs.get("cu_seq_lens_q") is None
    if pack is None and inner and outer is not None:  # some models do not pass them to inner models
        pack = outer.pack
    if pack is None or (BOUNDARIES in kwargs and (outer is None or outer.pack is not pack)):
        pack = find_pack(outer, args, kwargs)
    if pack is not None and "cu_seq_lens_q" in kwargs and kwargs.get(BOUNDARIES) is not pack:
        kwargs = {**kwargs, BOUNDARIES: pack}  # a layer that is recomputed gets them again
    if pack is not None:
        refuse_call(model, kwargs)
        if torch.compiler.is_compiling() or not model._thd_checked:
            _refuse_wrong_layers(model)
        if text is not None:
            if not torch.compiler.is_compiling():
                keep_frequencies(model)
            if text is not config and text._attn_implementation != NAME:
                raise ValueError(_other_attention(model, text._attn_implementation))
            if (caller := getattr(STATE, "caller", None)) is not None:
                _report_pack(model, pack, caller)
            refuse_changed_config(model)
            if any(name in kwargs for name in LABELS):
                kwargs = keep_labels_inside(model, kwargs, pack)
        if model._thd_takes_use_cache and kwargs.get("use_cache") is not False:
            kwargs = {**kwargs, "use_cache": False}
    STATE.scope = Scope(pack, outer, module=model, families=families, masks=masks)
    return args, kwargs


def leave(model: Any, args: tuple[Any, ...], output: Any) -> Any:
    """Pop a model off the stack, and replace or refuse an output that is pooled over the whole pack."""
    scope: Any = getattr(STATE, "scope", None)
    if scope is None or scope.module is not model:  # enter raised or did nothing
        return None
    STATE.scope = scope.outer
    if scope.pack is None or output is None:
        return None
    outermost = scope.outer is None or scope.outer.module is None
    if model._thd_pools or getattr(model, "pooler", None) is not None:
        return pool_each_sequence(model, scope.pack, output, outermost=outermost)
    if outermost and model._thd_own_class:  # a class of the user, which ``_thd_pools`` may miss
        refuse_pooled_pack(model, scope.pack, output)
    return None


def run_as_pack(model: Any, forward: Callable[..., Any], batch: THDBatch, **kwargs: Any) -> Any:
    """Run a model's forward on a pack, inside a call of the model on other inputs, such as padded rows."""
    with packed(batch):
        return _call_announced(model, forward, (), {**batch.hf_kwargs(), **kwargs})


def _call_announced(
    model: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a hooked model's forward between ``enter`` and ``leave``, for a call that bypasses the hooks."""
    entered = enter(model, args, kwargs)
    if entered is None:
        return forward(*args, **kwargs)
    output: Any = None
    try:
        output = forward(*entered[0], **entered[1])
    finally:
        pooled = leave(model, (), output)
    return output if pooled is None else pooled


def _report_pack(model: Any, pack: Pack, caller: Caller) -> None:
    if caller.labelled is not None:
        raise ValueError(
            f"{caller.labelled} got labels, and {type(model).__name__}, a model inside it, got a pack: a "
            f"loss over the row would mix sequences. Call set_attn_implementation('thd') on the outer "
            f"{caller.labelled}, or leave labels out and compute the loss from the logits."
        )
    caller.pack = pack


def _other_attention(model: Any, attention: str | None) -> str:
    return (
        f"{type(model).__name__} got a pack, and its language model runs attn_implementation={attention!r}, "
        "with which sequences of a pack would see each other. Call set_attn_implementation('thd') on "
        "the whole model. See docs/reference/messages.md#attention."
    )


def _refuse_pack(model: Any, offsets: Any) -> None:
    """Refuse several sequences if a model lost "thd", unless its attention kernels read the offsets."""
    attention = model.config._attn_implementation
    if offsets is not None and offsets.shape[0] > 2 and attention in ("eager", "sdpa", "flex_attention"):
        raise ValueError(
            f"{type(model).__name__} was given 'thd', got a pack and runs attn_implementation={attention!r}, "
            "with which sequences of a pack may see each other. It was switched, or another model was built "
            "from its config object. Call model.set_attn_implementation('thd'), and give each model a copy "
            "of the config. See docs/reference/messages.md#attention."
        )


def _refuse_wrong_layers(model: Any) -> None:
    """Refuse layers that "thd" cannot correct. A model that passed is checked again only if compiling."""
    if torch.compiler.is_compiling():
        reason = _reason_of(id(model))
    else:
        reason = _unknown_layers(model)
        model._thd_checked = reason is None
    if reason is not None:
        raise ValueError(reason)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _reason_of(model_id: int) -> str | None:
    model = _MODELS.get(model_id)
    if model is None:  # never adopted, because its class has its own __deepcopy__ or __setstate__
        return "A copied model cannot be checked while it is compiled. Call it once uncompiled first."
    return _unknown_layers(model)


def _unknown_layers(model: nn.Module) -> str | None:
    try:
        refuse_unknown_layers(model)
    except ValueError as error:
        return str(error)
    return None


# ---- Calls that miss the hooks


def guard(model_class: Any) -> None:
    """Replace the forward of a PreTrainedModel class; the new one looks for "thd" in the model's config."""
    forward = model_class.forward
    if forward is nn.Module.forward or hasattr(forward, "_thd_unguarded"):
        return
    names = _parameter_names(model_class)

    @functools.wraps(forward)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        scope: Scope | None = getattr(STATE, "scope", None)
        if scope is not None and scope.module is self:  # the hooks have announced this call
            try:
                return forward(self, *args, **kwargs)
            except (KeyboardInterrupt, SystemExit):  # after these torch does not call ``leave``
                STATE.scope = scope.outer
                raise
        if self.config._attn_implementation == NAME and getattr(self, "_thd_installed", False):
            return _call_announced(self, functools.partial(forward, self), args, kwargs)
        if _mentions_thd(self.config):
            _refuse_unannounced(self)
        boundaries = kwargs.get(BOUNDARIES)
        if boundaries is not None and "cu_seq_lens_q" not in kwargs:  # transformers has no name for them
            what = "whose sequences share prefixes"
            if boundaries.prefixes is None:
                what = "that context-parallel ranks share"
            raise ValueError(
                f"{type(self).__name__} got a batch {what} and runs "
                f"attn_implementation={self.config._attn_implementation!r}, which cannot share them. Build "
                "it with attn_implementation='thd', or collate with share_prefixes=False."
            )
        if not _HOOKED:
            return forward(self, *args, **kwargs)
        return _watched(forward, self, names, args, kwargs)

    guarded._thd_unguarded = forward  # type: ignore[attr-defined]
    patch("guard", model_class, "forward", guarded)


def _refuse_unannounced(model: Any) -> None:
    if NAME in (model.config._attn_implementation, _language_config(model.config)._attn_implementation):
        raise ValueError(
            f"{type(model).__name__} has a config that says 'thd', but was built with another attention and "
            "does not handle packs. Its config, or a part of it, was changed by hand or by a second model "
            "that was built from the same config object. Call set_attn_implementation('thd') on the whole "
            "model, or build it with attn_implementation='thd'. Do not assign to its config; give each model "
            "a copy. See docs/reference/messages.md#attention."
        )


def _watched(
    forward: Callable[..., Any],
    model: Any,
    names: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a model without "thd"; refuse its loss or pooled output if a model inside it gets a pack."""
    scope = current_scope()
    if scope is not None and scope.module is not None:
        if scope.pack is not None and type(model.config) in scope.families:
            raise ValueError(_other_attention(scope.module, model.config._attn_implementation))
        return forward(model, *args, **kwargs)
    before: Caller | None = getattr(STATE, "caller", None)
    given = _by_name(names, args, kwargs) or kwargs
    labelled = given.get("labels") is not None and given.get("shift_labels") is None
    name = type(model).__name__ if labelled else None if before is None else before.labelled
    STATE.caller = caller = Caller(name)
    try:
        output = forward(model, *args, **kwargs)
    finally:
        STATE.caller = before
    if caller.pack is not None:
        refuse_pooled_pack(model, caller.pack, output)
        if before is not None:
            before.pack = caller.pack
    return output


def _parameter_names(model_class: Any) -> tuple[str, ...]:
    parameters = list(inspect.signature(model_class.forward).parameters.values())[1:]
    known = itertools.takewhile(lambda x: x.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD, parameters)
    return tuple(parameter.name for parameter in known)


def _by_name(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return all arguments of a call by name, so that none is overlooked; None if they do not fit.

    ``("input_ids", "mask")``, ``(ids,)`` and ``{"mask": None}`` give ``{"input_ids": ids, "mask": None}``.
    """
    if len(args) > len(names) or any(name in kwargs for name in names[: len(args)]):
        return None  # an invalid call, or a forward with *args
    return {**dict(zip(names, args, strict=False)), **kwargs}


# ---- Activation checkpoints


def carry_scope(checkpoint: Callable[..., Any], *, compilable: bool) -> Callable[..., Any]:
    """Wrap an activation checkpoint function so that it recomputes in the scope of its first run.

    The backward pass recomputes after the model has returned, perhaps in another thread. ``compilable`` means
    that torch.compile traces the layers without a graph break. Around others, the wrapper is not traced.
    """
    if getattr(checkpoint, "_thd_carries", False):
        return checkpoint

    def checkpoint_with_scope(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return checkpoint(function, *args, **kwargs)
        scope = current_scope() or Scope(None, None)  # without a pack, so that no recomputation misses one

        def run(*inputs: Any, **named: Any) -> Any:
            with scoped(scope):
                return function(*inputs, **named)

        return checkpoint(run, *args, **kwargs)

    carrying: Any = checkpoint_with_scope
    if not compilable:
        carrying = torch.compiler.disable(carrying, recursive=False)  # type: ignore[no-untyped-call]
    carrying._thd_carries = True
    return cast("Callable[..., Any]", carrying)


def _carrying_checkpoints(base: Any) -> Callable[..., None]:
    """Return a ``_set_gradient_checkpointing`` whose checkpoints carry the pack to their recomputation."""
    set_checkpointing: Callable[..., None] = base._set_gradient_checkpointing
    if "gradient_checkpointing_func" not in inspect.signature(set_checkpointing).parameters:
        raise TypeError("_set_gradient_checkpointing takes no gradient_checkpointing_func")

    @functools.wraps(set_checkpointing)
    def _set_gradient_checkpointing(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(set_checkpointing).bind(self, *args, **kwargs)
        bound.apply_defaults()
        bound.arguments["gradient_checkpointing_func"] = carry_scope(
            bound.arguments["gradient_checkpointing_func"], compilable=not has_mixers(self)
        )
        set_checkpointing(*bound.args, **bound.kwargs)

    return _set_gradient_checkpointing


def watch_wrappers(checkpoint_wrapper: Any) -> None:
    """Patch torch's CheckpointWrapper, which FSDP strategies use, to carry the pack."""
    wrapper: Any = checkpoint_wrapper.CheckpointWrapper
    initialize: Callable[..., None] = wrapper.__init__

    @functools.wraps(initialize)
    def __init__(self: Any, mod: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, mod, *args, **kwargs)
        self.checkpoint_fn = carry_scope(self.checkpoint_fn, compilable=not has_mixers(mod))

    patch("checkpoints", wrapper, "__init__", __init__)
