"""The name ``"thd"`` -> entries in transformers' tables of attention functions and masks.

If transformers is too old, or its internals have changed, it can be imported, but models with "thd" raise.
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
    for name, table, install in (
        ("transformers.modeling_utils", "AttentionInterface", _attention),
        ("transformers.masking_utils", "AttentionMaskInterface", _mask),
    ):
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError, RuntimeError):  # not installed, or broken: the rest of us works
            return
        _register(table, install, module)


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


def _register(table: str, install: Callable[[ModuleType], Callable[..., Any]], module: ModuleType) -> None:
    """Register "thd" in a table of ``module``; after a problem, calls of models with "thd" raise an error."""
    entries = getattr(module, table, None)
    if entries is None:
        return  # transformers has no such table and refuses the name

    release = numbers(_installed())
    if release and is_older(_installed(), OLDEST):
        entries.register(NAME, _refusal("it is too old"))
        return

    try:
        entries.register(NAME, install(module))
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        entries.register(NAME, _refusal(f"its internals have changed ({error})"))


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
