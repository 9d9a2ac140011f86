"""The name ``"thd"`` -> entries in transformers' tables of attention functions and masks.

If transformers is too old, or its internals have changed, it can be imported, but models with "thd" raise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from lightning_thd._versions import SUPPORTED, installed_version, is_older, numbers, releases_of

NAME = "thd"
OLDEST: Final = SUPPORTED["transformers"].oldest
Callback = Callable[[ModuleType], None]
_done: set[str] = set()


def register_thd() -> None:
    """Register ``attn_implementation="thd"``, now or when transformers is imported; more calls do no harm."""
    for name, callback in (
        ("transformers.modeling_utils", partial(_register, "AttentionInterface", _attention)),
        ("transformers.masking_utils", partial(_register, "AttentionMaskInterface", _mask)),
    ):
        if name not in _done:
            _done.add(name)
            after_import(name, callback)


def _installed() -> str:
    return installed_version("transformers") or "of unknown version"


def _refusal(what: str) -> Callable[..., Any]:
    message = (
        f"attn_implementation='thd' is not available with transformers {_installed()}: {what}. Install a "
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


class _Finder:
    """An import finder, first in ``sys.meta_path``, that runs a callback after a module was imported."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callback]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module from the next finder, with a loader that runs the callback."""
        if name not in self.callbacks:
            return None
        finders = [getattr(finder, "find_spec", None) for finder in sys.meta_path if finder is not self]
        specs = (find_spec(name, path, target) for find_spec in finders if find_spec is not None)
        spec: ModuleSpec | None = next((x for x in specs if x is not None and x.loader is not None), None)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for callback in self.callbacks.pop(name, []):
                callback(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _Finder()


def after_import(name: str, callback: Callback) -> None:
    """Run ``callback(module)`` after ``name`` has been imported; errors of the callback fail the import."""
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
        return
    _finder.callbacks.setdefault(name, []).append(callback)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
