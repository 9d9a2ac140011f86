"""A value that a step has read -> what it holds, in any nesting, to be compared before every replay."""

from __future__ import annotations

import dataclasses
import functools
import logging
import types
from operator import is_
from typing import Any

from torch import Tensor, nn

from lightning_thd.cuda_graph.limits.attribute_reads import PLAIN

# Entries that are compared; of a container beyond them the size.
_MOST = 1000
_DEPTH = 4
# Compared by identity: a function's code does not change, and the other ones have eyes of their own on them.
_WHOLE = (
    *(Tensor, nn.Module, type, types.ModuleType, logging.Logger),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType),
)


class Contents:
    """What a value holds at the time this is made: numbers and texts by value, everything else by identity.

    Args:
        value: a number, function, container, config, or any object with attributes.
        names: of attributes that are looked at; None for all.
    """

    def __init__(self, value: Any, names: frozenset[str] | None = None) -> None:
        self.value, self._names = value, names
        self._plain, self._held = _flatten(value, names)
        self._types = [*map(type, self._plain)]  # 2.0 equals 2, and gives tensors of another dtype

    def changed(self, value: Any) -> bool:
        """Return whether a value holds something else; the same one after a change in place does."""
        plain, held = _flatten(value, self._names)
        same = len(held) == len(self._held) and all(map(is_, held, self._held))
        return not same or plain != self._plain or [*map(type, plain)] != self._types

    @property
    def inside(self) -> bool:
        """Return whether there is anything beside the value's own identity to look at."""
        return bool(self._plain) or len(self._held) > 1


def _flatten(value: Any, names: frozenset[str] | None) -> tuple[list[Any], list[Any]]:
    plain: list[Any] = []
    held: list[Any] = []
    seen: set[int] = set()

    def walk(value: Any, depth: int) -> None:
        if isinstance(value, PLAIN):
            plain.append(value)
            return
        held.append(value)
        if depth < 0 or isinstance(value, _WHOLE) or id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, set | frozenset):
            plain.append({x for x in value if isinstance(x, PLAIN)})
            return
        members = _members(value, names)
        plain.append(len(members))
        if len(plain) + len(held) + 2 * len(members) > 2 * _MOST:
            return
        for key, member in members:
            (plain if isinstance(key, PLAIN) else held).append(key)
            walk(member, depth - 1)

    walk(value, _DEPTH)
    return plain, held


def _members(value: Any, names: frozenset[str] | None) -> list[tuple[Any, Any]]:
    """List what a container or an object holds, by key, index or name; attributes only with these names."""
    if isinstance(value, dict):
        return [*value.items()]
    if isinstance(value, list | tuple):
        return [*enumerate(value)]
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    held = getattr(value, "__dict__", None)
    if not isinstance(held, dict):
        slots = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        held = {field.name: getattr(value, field.name) for field in slots if hasattr(value, field.name)}
    if names is None:
        return [*held.items()]
    renamed = set(getattr(value, "attribute_map", {}).values())  # configs of transformers
    return [(name, x) for name, x in held.items() if name in names or name in renamed]
