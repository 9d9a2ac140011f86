"""A model and its parts -> which of them run "thd"."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from torch import nn

from lightning_thd.models.refusals import keeps_own_attention

NAME: Final = "thd"


def is_transformers_model(module: object) -> bool:
    """Return whether a module is a model of transformers, which has a config and chooses an attention."""
    return is_kind_of_transformers(type(module))


def is_kind_of_transformers(kind: type) -> bool:
    """Return whether a class is that of a model of transformers."""
    return hasattr(kind, "get_correct_attn_implementation")


def mentions_thd(config: Any) -> bool:
    """Return whether a config, or one inside it, names "thd"."""
    if config._attn_implementation == NAME:
        return True
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if hasattr(inner, "sub_configs") and mentions_thd(inner):
            return True
    return False


def choose_attention(config: Any, name: str | None) -> None:
    """Set the attention of a config, and keep that of the configs inside it."""
    before = [(inner, inner._attn_implementation) for inner in _inside(config)]
    config._attn_implementation = {"": name}  # "" stands for the config itself
    for inner, chosen in before:  # outer ones first: the setter hands a name on to what is inside
        if inner._attn_implementation != chosen:
            inner._attn_implementation = {"": chosen}


def _inside(config: Any) -> Iterator[Any]:
    """Yield the configs inside a config, outer ones first."""
    inner = [getattr(config, name, None) for name in config.sub_configs]
    configs = [each for each in inner if hasattr(each, "sub_configs")]
    yield from configs
    for each in configs:
        yield from _inside(each)


def spread_thd(model: nn.Module, *, follow: bool) -> None:
    """Set "thd" on every model around a language model with "thd".

    If the language model has lost "thd", ``follow`` gives its new attention to the outer models. Without
    ``follow`` they keep the "thd" that was asked for by name.
    """
    inside: list[Any] = [module for module in model.modules() if is_transformers_model(module)]
    for inner in reversed(inside):
        present = inner.config._attn_implementation
        # get_text_config() is slow if one config has an encoder and a decoder.
        of_language = present
        if mentions_thd(inner.config):
            of_language = language_config(inner.config)._attn_implementation

        attention = present
        if of_language == NAME or follow:
            attention = of_language
        if NAME in (present, attention) and not keeps_own_attention(inner):
            choose_attention(inner.config, inner.get_correct_attn_implementation(attention))


def language_config(config: Any) -> Any:
    """Return the config of the language model inside a config; the config itself where there are several."""
    try:
        return config.get_text_config(decoder=True)
    except ValueError:  # several language models
        return config
