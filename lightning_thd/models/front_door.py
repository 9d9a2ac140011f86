"""The forward of every transformers model -> the same, watched: no call reaches "thd" layers by a side door.

Hooks announce the packs of models that were given "thd", where these are called. ``guard`` sees the rest: a
``model.forward(...)`` past the hooks, a model whose config was switched behind its back, a part of a model
with "thd" in a whole without. The first is announced here; the others are refused where sequences would meet.
``settle`` gives "thd" to every model around a language model that has it, so that few come that far.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_thd.models.hooks import NAME, adopt, call_announced, hooked_before, install, other_attention
from lightning_thd.models.inputs.arguments import by_name, parameter_names
from lightning_thd.models.own_attention import keeps_own_attention, refuse_own_attention
from lightning_thd.models.pack import Caller, current_caller, current_scope, set_caller
from lightning_thd.models.pooled_heads import refuse_one_row


def watch_construction(base: Any) -> None:
    """Hook every model that is built with "thd" or switched to it, and guard every model class.

    Args:
        base: ``PreTrainedModel``; AttributeError where it lacks what is patched, before anything is.
    """
    choose: Callable[..., str] = base.get_correct_attn_implementation
    switch: Callable[..., None] = base.set_attn_implementation
    finish: Callable[..., None] = base.post_init

    @functools.wraps(choose)
    def get_correct_attn_implementation(self: Any, *args: Any, **kwargs: Any) -> str:
        chosen = choose(self, *args, **kwargs)
        if chosen == NAME and keeps_own_attention(self):
            chosen = choose(self, None)  # a tower: packs are none of its business
        elif chosen == NAME:
            refuse_own_attention(self)
            install(self)
        guard(type(self))
        return chosen

    @functools.wraps(switch)
    def set_attn_implementation(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        named = isinstance(attn_implementation, dict)
        asked = attn_implementation.get("") if named else attn_implementation
        with _unchanged_on_error(self):
            switch(self, attn_implementation, *args, **kwargs)
            if asked == NAME:  # of a class it cannot switch, transformers only logs so
                self.config._attn_implementation_internal = self.get_correct_attn_implementation(NAME)
            _settle(self, follow=asked is None)

    @functools.wraps(finish)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        finish(self, *args, **kwargs)
        if _mentions_thd(self.config):
            _settle(self, follow=False)

    base.get_correct_attn_implementation = get_correct_attn_implementation
    base.set_attn_implementation = set_attn_implementation
    base.post_init = post_init


def watch_copies(base: Any) -> None:
    """Make a copied or unpickled model known, and teach the classes of its layers in a new process."""
    restore: Callable[..., None] = base.__setstate__

    @functools.wraps(restore)
    def __setstate__(self: Any, state: Any) -> None:
        restore(self, state)
        guard(type(self))
        if getattr(self, "_thd_installed", False):
            adopt(self)

    base.__setstate__ = __setstate__


def guard_known_classes(base: Any) -> None:
    """Guard the classes of models that were imported, and perhaps built, before this package."""
    waiting = list(base.__subclasses__())
    while waiting:
        model_class = waiting.pop()
        waiting.extend(model_class.__subclasses__())
        if "forward" in vars(model_class):
            guard(model_class)


def guard(model_class: Any) -> None:
    """Replace the forward of a PreTrainedModel class by one that looks for "thd" in the model's config.

    Args:
        model_class: its instances without "thd" do what they did.
    """
    forward = model_class.forward
    if forward is nn.Module.forward or hasattr(forward, "_thd_unguarded"):
        return
    names = parameter_names(model_class)

    @functools.wraps(forward)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        scope = current_scope()
        if scope is not None and scope.module is self:  # announced by its hooks
            return forward(self, *args, **kwargs)
        if self.config._attn_implementation == NAME and getattr(self, "_thd_installed", False):
            return call_announced(self, functools.partial(forward, self), args, kwargs)
        if _mentions_thd(self.config):
            _refuse_unannounced(self)
        if not hooked_before():
            return forward(self, *args, **kwargs)
        return _watched(forward, self, names, args, kwargs)

    guarded._thd_unguarded = forward  # type: ignore[attr-defined]
    model_class.forward = guarded


def _refuse_unannounced(model: Any) -> None:
    """Refuse a model whose own or language model's config says "thd" while the model was never told."""
    if NAME in (model.config._attn_implementation, _language_config(model.config)._attn_implementation):
        raise ValueError(
            f"{type(model).__name__} has a config that says 'thd', but was built with another attention and "
            "knows nothing of packs: its config or a part of it alone was switched, by hand or by a second "
            "model built from the same config object. Call set_attn_implementation('thd') on the whole "
            "model, or build it with attn_implementation='thd'. Do not assign to its config; give each model "
            "a copy."
        )


def _watched(
    forward: Callable[..., Any],
    model: Any,
    names: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a model without "thd", and refuse what it makes of a pack that a model inside it works on."""
    scope = current_scope()
    if scope is not None and scope.module is not None:
        if scope.pack is not None and type(model.config) in scope.families:
            raise ValueError(other_attention(scope.module, model.config._attn_implementation))
        return forward(model, *args, **kwargs)
    before = current_caller()
    given = by_name(names, args, kwargs) or kwargs
    labelled = given.get("labels") is not None and given.get("shift_labels") is None
    name = type(model).__name__ if labelled else None if before is None else before.labelled
    caller = Caller(name)
    set_caller(caller)
    try:
        output = forward(model, *args, **kwargs)
    finally:
        set_caller(before)
    if caller.pack is not None:
        refuse_one_row(model, caller.pack, output)
        if before is not None:
            before.pack = caller.pack
    return output


def _settle(model: nn.Module, *, follow: bool) -> None:
    """Give "thd" to every model around a language model that has it, and take it where that has lost it.

    Args:
        model: a PreTrainedModel, finished; those inside it are settled first.
        follow: False where the caller named the attention of the outer model, which then keeps "thd".

    Raises:
        ValueError: where "thd" cannot be right for one of them.
    """
    inside: list[Any] = [x for x in model.modules() if hasattr(type(x), "get_correct_attn_implementation")]
    for inner in reversed(inside):
        own, text = inner.config._attn_implementation, _language_config(inner.config)._attn_implementation
        wanted = text if text == NAME or follow else own
        if NAME in (own, wanted) and not keeps_own_attention(inner):
            chosen = inner.get_correct_attn_implementation(wanted)
            inner.config._attn_implementation_internal = chosen


def _language_config(config: Any) -> Any:
    """Return the config of the language model inside a model's config, or the config itself."""
    if not _mentions_thd(config):  # looking is dear for models of two stacks in one config
        return config
    try:
        return config.get_text_config(decoder=True)
    except ValueError:  # several language models
        return config


def _mentions_thd(config: Any) -> bool:
    """Return whether a config or one inside it says "thd"."""
    if config._attn_implementation == NAME:
        return True
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if hasattr(inner, "sub_configs") and _mentions_thd(inner):
            return True
    return False


@contextmanager
def _unchanged_on_error(model: nn.Module) -> Generator[None]:
    """Restore the attention of every config of a model when switching it raises inside this context."""
    configs = {id(config): config for module in model.modules() for config in _configs(module)}
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        yield
    except BaseException:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
        raise


def _configs(module: Any) -> list[Any]:
    """Return the config of a module and those inside it."""
    found: list[Any] = []
    waiting = [getattr(module, "config", None)]
    while waiting:
        config: Any = waiting.pop()
        if hasattr(config, "sub_configs"):
            found.append(config)
            waiting.extend(getattr(config, name, None) for name in config.sub_configs)
    return found
