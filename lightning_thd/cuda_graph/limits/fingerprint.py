"""A module -> what a graph of its step has baked in, to be compared before every replay.

A replay runs no Python: a layer that was replaced, a hook that was added or a number that a layer reads goes
unseen. So the modules that the step uses, their classes and hooks, the memory of their tensors and the
attributes, globals and enclosed names that it reads are looked at before each.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain
from operator import is_
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules import module as every_module

from lightning_thd.cuda_graph.limits.attribute_reads import ABSENT, PLAIN, Reads, is_same
from lightning_thd.cuda_graph.limits.contents import Contents
from lightning_thd.cuda_graph.limits.names import Classes, Names, names_in
from lightning_thd.cuda_graph.limits.subclasses import addresses

_REGISTRIES = {
    "_parameters": "parameters",
    "_buffers": "buffers",
    "_modules": "modules",
    "_forward_hooks": "hooks",
    "_forward_pre_hooks": "hooks",
    "_backward_hooks": "hooks",
    "_backward_pre_hooks": "hooks",
}
_HOOKS = [kind for kind in _REGISTRIES if _REGISTRIES[kind] == "hooks"]
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
        function: the step, for the globals and enclosed names that it reads; None leaves them out.
    """

    def __init__(self, module: nn.Module, reads: Reads, function: Any = None) -> None:
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
        code = reads.code.values()
        names = names_in(ran for ran, _ in code) if code else None
        self._constants = _Constants(used, reads, names)
        self._classes = Classes(child for _, child in used)
        self._names = Names(code if function is not None else (), function, names)

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
        return (
            self._registries.change()
            or self._constants.change()
            or self._classes.change()
            or self._names.change()
        )


class _Registries:
    """What modules hold: submodules, parameters, buffers and hooks."""

    def __init__(self, modules: list[tuple[str, nn.Module]]) -> None:
        self._all: list[tuple[str, str, dict[Any, Any]]] = [
            (path or "the module", kind, vars(child)[kind])
            for path, child in modules
            for kind in _REGISTRIES
            if type(vars(child).get(kind)) in (dict, OrderedDict)  # a scripted module has others
        ]
        self._all += [("every module", kind, getattr(every_module, f"_global{kind}")) for kind in _HOOKS]
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

    def __init__(
        self, modules: list[tuple[str, nn.Module]], reads: Reads, names: frozenset[str] | None
    ) -> None:
        paths = {id(child): path for path, child in modules}
        found = {(paths[id(child)], name): child for child, name in reads.constants.values()}
        self._values = [
            (f"{path}.{name}" if path else name, vars(child), name, vars(child).get(name, ABSENT))
            for (path, name), child in sorted(found.items(), key=lambda item: item[0])
        ]
        # Layers share a config: what it holds is looked at once.
        objects = {id(value): (where, value) for where, _, _, value in reversed(self._values)}
        self._contents = [
            (where, contents)
            for where, value in objects.values()
            if not isinstance(value, PLAIN) and (contents := Contents(value, names)).inside
        ]
        self._absent: dict[int, set[str]] = {}
        for child, name in reads.absent.values():
            if name not in vars(child):
                self._absent.setdefault(id(child), set()).add(name)
        self._sizes = [
            (path, vars(child), len(vars(child))) for path, child in modules if id(child) in self._absent
        ]
        self._wanted = [self._absent[id(child)] for _, child in modules if id(child) in self._absent]

    def change(self) -> str | None:
        """Return the attribute that has changed, or None."""
        for where, held, name, before in self._values:
            now = held.get(name, ABSENT)
            if not is_same(now, before):
                return f"the attribute {where}, which the step reads, changed"
        for where, contents in self._contents:
            if contents.changed(contents.value):
                return f"what the attribute {where}, which the step reads, holds has changed"
        for (path, held, size), names in zip(self._sizes, self._wanted, strict=True):
            if len(held) != size and not names.isdisjoint(held):
                name = min(names & held.keys())
                where = f"{path}.{name}" if path else name
                return f"the attribute {where}, which the step reads, is new"
        return None
