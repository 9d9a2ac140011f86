"""The name ``"thd"`` -> entries in transformers' tables of attention functions and masks.

If transformers is too old, or its internals have changed, it can be imported, but a model with "thd" raises
when it is built or switched. If even the method that chooses a model's attention is gone, its call raises.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from lightning_thd._versions import SUPPORTED, installed_version, is_older, numbers, releases_of

NAME = "thd"
OLDEST: Final = SUPPORTED["transformers"].oldest


@functools.cache
def register_thd() -> None:
    """Register ``attn_implementation="thd"`` with transformers, if installed; more calls do nothing."""
    base: Any = None  # transformers' class of all models
    for name, table, install in (
        ("transformers.modeling_utils", "AttentionInterface", _attention),
        ("transformers.masking_utils", "AttentionMaskInterface", _mask),
    ):
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError, RuntimeError):  # not installed, or broken: the rest of us works
            return
        base = getattr(module, "PreTrainedModel", base)
        refusal = _register(table, install, module)
        if refusal is not None:
            _refuse_models(base, refusal)


def _installed() -> str:
    return installed_version("transformers") or "of unknown version"


def _refusal(reason: str) -> Callable[..., Any]:
    """Return a function for the table that refuses "thd"."""
    message = (
        f"attn_implementation='thd' is not available with transformers {_installed()}: {reason}. Install a "
        f"release from {releases_of('transformers')}, or a newer lightning_thd."
    )

    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError(message)

    return refuse


def _register(
    table: str, install: Callable[[ModuleType], Callable[..., Any]], module: ModuleType
) -> Callable[..., Any] | None:
    """Register "thd" in a table of ``module``; after a problem, register and return a refusal."""
    entries = getattr(module, table, None)
    if entries is None:
        return None  # transformers has no such table and refuses the name

    release = numbers(_installed())
    if release and is_older(_installed(), OLDEST):
        refusal = _refusal("it is too old")
    else:
        try:
            entries.register(NAME, install(module))
        except (AttributeError, ImportError, TypeError, ValueError) as error:
            refusal = _refusal(f"its internals have changed ({error})")
        else:
            return None

    entries.register(NAME, refusal)
    return refusal


def _refuse_models(base: Any, refusal: Callable[..., Any]) -> None:
    """Refuse every model of class ``base`` that is built with "thd" or switched to it."""
    choose: Callable[..., Any] | None = getattr(base, "get_correct_attn_implementation", None)
    if choose is None:
        return  # the call of a model raises

    @functools.wraps(choose)
    def get_correct_attn_implementation(self: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = choose(self, *args, **kwargs)
        if chosen == NAME:
            refusal()
        return chosen

    # The row "attention chosen" of ``_patches``.
    base.get_correct_attn_implementation = get_correct_attn_implementation


def _attention(modeling_utils: ModuleType) -> Callable[..., Any]:
    from lightning_thd.models.attend import thd_attention
    from lightning_thd.models.families.qwen_vl import FLASH_NAME
    from lightning_thd.models.preparing import watch_attention

    watch_attention(modeling_utils.PreTrainedModel)
    modeling_utils.AttentionInterface.register(FLASH_NAME, thd_attention)
    return thd_attention


def _mask(masking_utils: ModuleType) -> Callable[..., Any]:
    from lightning_thd.models.masks import thd_mask

    return thd_mask
