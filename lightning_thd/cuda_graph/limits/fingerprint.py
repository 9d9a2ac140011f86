"""A module -> what a graph of its step has baked in, to be compared before every replay.

A replay runs no Python: a layer that was replaced, a hook that was added or a number that a layer reads goes
unseen. So the modules that the step uses, their hooks, the memory of their tensors and the constants that it
reads are looked at before each.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain
from operator import is_
from typing import Any, TypeVar

from torch import Tensor, nn

from lightning_thd.cuda_graph.limits.attribute_reads import ABSENT, PLAIN, Reads
from lightning_thd.cuda_graph.limits.subclasses import addresses

_CONTAINERS = (list, dict, set, tuple)
_MOST = 1000  # entries of a container that are compared; of a larger one its size
_REGISTRIES = {
    "_parameters": "parameters",
    "_buffers": "buffers",
    "_modules": "modules",
    "_forward_hooks": "hooks",
    "_forward_pre_hooks": "hooks",
    "_backward_hooks": "hooks",
    "_backward_pre_hooks": "hooks",
}
_LOOKS = "_thd_only_looks"

F = TypeVar("F")


def only_looking(hook: F) -> F:
    """Mark a hook that changes nothing that the step computes: graphs stay when it comes and goes."""
    setattr(hook, _LOOKS, True)
    return hook


class Fingerprint:
    """The modules, hooks, addresses, flags and constants that a graph has baked in.

    Args:
        module: that the step trains.
        reads: what the step uses of it.
    """

    def __init__(self, module: nn.Module, reads: Reads) -> None:
        modules = list(module.named_modules())
        used = [(path, child) for path, child in modules if id(child) in reads.modules]
        self._registries = _Registries(used)
        self._forwards = [(path, vars(child), vars(child).get("forward")) for path, child in used]
        self._flags = [(vars(child), child.training) for _, child in modules]
        self._tensors = [
            (held, name, x, addresses(x), x.requires_grad)
            for _, child in modules
            for held in (child._parameters, child._buffers)
            for name, x in held.items()
            if x is not None
        ]
        self._constants = _Constants(used, reads)

    def change(self) -> str | None:
        """Return the first thing that has changed since the fingerprint was taken, or None."""
        for held, name, tensor, where, wanted in self._tensors:
            if held.get(name) is not tensor or addresses(tensor) != where:
                return f"{name} moved to other memory"
            if tensor.requires_grad != wanted:
                return f"{name}.requires_grad changed"
        if any(held["training"] is not before for held, before in self._flags):
            return "a module changed between train() and eval()"
        for path, held, forward in self._forwards:
            if held.get("forward") is not forward:
                return f"the forward of {path or 'the module'} was replaced"
        return self._registries.change() or self._constants.change()


class _Registries:
    """What modules hold: submodules, parameters, buffers and hooks."""

    def __init__(self, modules: list[tuple[str, nn.Module]]) -> None:
        self._all: list[tuple[str, str, dict[Any, Any]]] = [
            (path or "the module", kind, vars(child)[kind])
            for path, child in modules
            for kind in _REGISTRIES
            if type(vars(child).get(kind)) in (dict, OrderedDict)  # a scripted module has others
        ]
        self._before = [_members(held) for *_, held in self._all]
        self._remember()

    def change(self) -> str | None:
        """Return the registry that has changed, or None."""
        # Most are empty. The rest is compared in one go, without a loop in Python.
        now = list(chain.from_iterable(map(dict.values, self._filled)))
        same = len(now) == len(self._flat) and all(map(is_, now, self._flat))
        if same and not any(self._empty):
            return None
        for (name, kind, held), before in zip(self._all, self._before, strict=True):
            members = _members(held)
            if len(members) != len(before) or not all(map(is_, members, before)):
                return f"the {_REGISTRIES[kind]} of {name} changed"
        self._remember()
        return None

    def _remember(self) -> None:
        self._empty = [held for *_, held in self._all if not held]
        self._filled = [held for *_, held in self._all if held]
        self._flat = list(chain.from_iterable(map(dict.values, self._filled)))


def _members(held: dict[Any, Any]) -> list[Any]:
    return [member for member in held.values() if not getattr(member, _LOOKS, False)]


class _Constants:
    """The values of attributes that a step has read, and what those hold that are containers or configs."""

    def __init__(self, modules: list[tuple[str, nn.Module]], reads: Reads) -> None:
        paths = {id(child): path for path, child in modules}
        found = {(paths[id(child)], name): child for child, name in reads.constants.values()}
        self._values = [
            (f"{path}.{name}" if path else name, child, name, getattr(child, name))
            for (path, name), child in sorted(found.items(), key=lambda item: item[0])
        ]
        # Layers share a config: what it holds is looked at once.
        objects = {id(value): (where, value) for where, _, _, value in reversed(self._values)}
        self._contents = [
            (where, value, contents)
            for where, value in objects.values()
            if (contents := _contents(value)) is not None
        ]

    def change(self) -> str | None:
        """Return the attribute that has changed, or None."""
        for where, child, name, before in self._values:
            now = getattr(child, name, ABSENT)
            if not (
                now is before or (isinstance(before, PLAIN) and type(now) is type(before) and now == before)
            ):
                return f"the attribute {where}, which the step reads, changed"
        for where, value, contents in self._contents:
            if _contents(value) != contents:
                return f"what the attribute {where}, which the step reads, holds has changed"
        return None


def _contents(value: Any) -> Any:
    """Return what a container, a config or the like holds, one level deep; None for anything else."""
    if isinstance(value, (*PLAIN, Tensor, nn.Module)):
        return None
    if isinstance(value, _CONTAINERS):
        if len(value) > _MOST:
            return len(value)
        if isinstance(value, set):
            return set(value)
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        return [(key, x if isinstance(x, PLAIN) else id(x)) for key, x in entries]
    held = getattr(value, "__dict__", None)
    if held is None or len(held) > _MOST:
        return None
    return [(name, x) for name, x in held.items() if isinstance(x, PLAIN)]
