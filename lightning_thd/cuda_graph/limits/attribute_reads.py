"""A module and a step -> the names of the module's attributes that the step reads as constants."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def reads_of(module: nn.Module) -> Iterator[set[str]]:
    """Record which instance attributes of ``module`` are read inside this context.

    Args:
        module: watched through a subclass that it is an instance of meanwhile.

    Yields:
        The names read so far: of ``self.alpha`` in a step ``"alpha"``; submodules, parameters, buffers and
        what the class defines are left out.
    """
    names: set[str] = set()
    cls: Any = type(module)

    def spy(self: Any, name: str) -> Any:
        value = cls.__getattribute__(self, name)
        if self is module and name[0] != "_" and name in object.__getattribute__(self, "__dict__"):
            names.add(name)
        return value

    module.__class__ = type(cls.__name__, (cls,), {"__getattribute__": spy, "__module__": cls.__module__})
    try:
        yield names
    finally:
        module.__class__ = cls


def constants_of(module: nn.Module, names: set[str]) -> set[str]:
    """Return the names of plain attributes: no methods, and none that exist only during a step."""
    held = vars(module)
    return {name for name in names if name in held and not callable(held[name])}
