"""A module name and a callback -> the callback runs once the module has been imported, now or later.

``import lightning_thd`` must not import transformers, and still ``attn_implementation="thd"`` has to work
however the user comes to his model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

Callback = Callable[[ModuleType], None]


class _Finder:
    """Import finder, first in ``sys.meta_path``, that runs a callback after a module was imported."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callback]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module from the next finder, with a loader that runs the callback."""
        if name not in self.callbacks:
            return None
        for finder in sys.meta_path:
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find_spec is None else find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                self._extend(spec)
                return spec
        return None

    def _extend(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        assert loader is not None
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for callback in self.callbacks.pop(spec.name, []):
                callback(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]


_finder = _Finder()


def after_import(name: str, callback: Callback) -> None:
    """Run ``callback(module)`` after ``name`` has been imported; its errors fail the import."""
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
        return
    _finder.callbacks.setdefault(name, []).append(callback)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
