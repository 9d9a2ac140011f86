"""Nested tuples, lists and dicts -> their leaves, and the same nest with other leaves.

Subclasses of these count too, such as named tuples and the outputs of transformers' models. Everything else
is a leaf, None included. torch has such functions as well, in a module that is not public.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Nest(NamedTuple):
    """A nest whose leaves were taken out."""

    value: Any  # the nest, whose leaves ``tree_unflatten`` replaces


def tree_map(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a nest with ``function(leaf)`` in place of every leaf.

    ``tree_map(abs, (-1, {"x": [-2]}))`` is ``(1, {"x": [2]})``.
    """
    if isinstance(value, dict):
        made = copy.copy(value)  # keeps the class, such as that of a model's output
        for key, entry in value.items():
            made[key] = tree_map(function, entry)
        return made
    if isinstance(value, tuple | list):
        entries = [tree_map(function, entry) for entry in value]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    return function(value)


def tree_map_only(kind: type, function: Callable[[Any], Any], value: Any) -> Any:
    """Return a nest with ``function(leaf)`` in place of every leaf of a class."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, kind) else leaf, value)


def tree_leaves(value: Any) -> list[Any]:
    """Return the leaves of a nest in order; ``(1, {"x": [2, 3]})`` has 1, 2 and 3."""
    return [leaf for _, leaf in tree_paths(value)]


def tree_paths(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf of a nest with the indices that lead to it; in ``(1, {"x": 2})`` 2 is at "[1]['x']"."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from tree_paths(entry, f"{path}[{key!r}]")
    elif isinstance(value, tuple | list):
        for index, entry in enumerate(value):
            yield from tree_paths(entry, f"{path}[{index}]")
    else:
        yield path, value


def tree_flatten(value: Any) -> tuple[list[Any], Nest]:
    """Return the leaves of a nest, and the nest for ``tree_unflatten``."""
    return tree_leaves(value), Nest(tree_map(lambda _: None, value))


def tree_unflatten(leaves: list[Any], nest: Nest) -> Any:
    """Return a nest with other leaves, in order."""
    remaining = iter(leaves)
    return tree_map(lambda _: next(remaining), nest.value)
