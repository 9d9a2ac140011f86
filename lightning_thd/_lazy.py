"""A package's public names and their modules -> functions that import each at its first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def know_thd(_: str) -> None:
    """Register ``attn_implementation="thd"`` with transformers, before a name of a package is used.

    ``lightning_thd.models`` does it when it is imported. Its own files import from the modules that define
    a name, so none of them comes here before they are complete.
    """
    if "lightning_thd.models" not in sys.modules:
        importlib.import_module("lightning_thd.models")


def lazy_face(
    package: str, places: Mapping[str, str], *, before: Callable[[str], None] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's ``__getattr__`` and ``__dir__``.

    Args:
        package: its name.
        places: a public name -> the module that defines it, or the name's own module where it is one.
        before: called with a name before it is imported.
    """

    def __getattr__(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if before is not None:
            before(name)
        module = importlib.import_module(places[name])
        is_submodule = places[name] == f"{package}.{name}"
        value: ModuleType | Any = module if is_submodule else getattr(module, name)
        # The next access finds the name without this function.
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places})

    return __getattr__, __dir__
