"""The functions that a step ran -> the globals and closures they read, to be compared before every replay."""

from __future__ import annotations

import dis
import functools
import site
import sysconfig
import types
from collections.abc import Iterable, Iterator
from operator import is_
from os.path import dirname
from typing import Any

from torch import nn

from lightning_thd.cuda_graph.limits.attribute_reads import ABSENT, PLAIN, is_same
from lightning_thd.cuda_graph.limits.contents import Contents

_OWN = dirname(dirname(dirname(__file__)))
_LIBRARIES = tuple(
    {*site.getsitepackages(), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), _OWN}
)
_CODE = (types.FunctionType, types.BuiltinFunctionType, type)


class Names:
    """The globals, closures and defaults that functions of a step read, at the time this is made.

    Args:
        code: of functions that ran, with the globals they see. Of libraries' functions only functions and
            classes are looked at, as numbers there count calls; those of this package are left out.
        function: the step, whose closures are followed.
        names: see ``Contents``.
    """

    def __init__(
        self,
        code: Iterable[tuple[types.CodeType, dict[str, Any]]],
        function: Any,
        names: frozenset[str] | None,
    ) -> None:
        self._names = names
        self._plain: list[tuple[dict[str, Any], str, Any]] = []
        self._held: list[tuple[dict[str, Any], str, Contents]] = []
        self._cells = [(name, cell, Contents(cell.cell_contents, names)) for name, cell in _cells(function)]
        for ran, held in code:
            if not ran.co_filename.startswith(_OWN):
                self._add(ran, held, theirs=ran.co_filename.startswith(_LIBRARIES))

    def change(self) -> str | None:
        """Return the global or enclosed name that has changed, or None."""
        for held, name, before in self._plain:
            now = held.get(name, ABSENT)
            if not is_same(now, before):
                return f"the global {name}, which the step reads, changed"
        for held, name, contents in self._held:
            if contents.changed(held.get(name, ABSENT)):
                return f"the global {name}, which the step reads, or what it holds has changed"
        for name, cell, contents in self._cells:
            if contents.changed(cell.cell_contents):
                return f"{name}, which the step takes from around it, changed"
        return None

    def _add(self, ran: types.CodeType, held: dict[str, Any], *, theirs: bool) -> None:
        for name in ran.co_names if theirs else _globals(ran):
            value = held.get(name, ABSENT)
            if isinstance(value, _CODE) or (not theirs and isinstance(value, PLAIN)):
                self._plain.append((held, name, value))
            elif not theirs and not isinstance(value, types.ModuleType) and value is not ABSENT:
                self._held.append((held, name, Contents(value, self._names)))


def names_in(code: Iterable[types.CodeType]) -> frozenset[str]:
    """Return the names, and the texts, in the code of functions: what they may read of an object."""
    names: set[str] = set()
    for ran in code:
        names.update(ran.co_names, (x for x in ran.co_consts if isinstance(x, str)))
    return frozenset(names)


def _globals(code: types.CodeType) -> list[str]:
    loads = ("LOAD_GLOBAL", "LOAD_NAME")
    return [line.argval for line in dis.get_instructions(code) if line.opname in loads]


def _cells(function: Any) -> Iterator[tuple[str, types.CellType]]:
    """Yield the closure cells of a step and of functions it encloses, by name."""
    seen: set[int] = set()
    waiting = [function]
    while waiting:
        found = waiting.pop()
        while isinstance(found, types.MethodType | functools.partial):
            found = found.__func__ if isinstance(found, types.MethodType) else found.func
        if not isinstance(found, types.FunctionType) or id(found) in seen:
            continue
        seen.add(id(found))
        if (found.__module__ or "").startswith("lightning_thd.") and found.__closure__:
            waiting += [cell.cell_contents for cell in found.__closure__]  # wrappers of ours around the step
            continue
        for name, cell in zip(found.__code__.co_freevars, found.__closure__ or (), strict=True):
            if name != "__class__" and _is_set(cell) and not isinstance(cell.cell_contents, nn.Module):
                yield name, cell
                waiting.append(cell.cell_contents)


def _is_set(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not ABSENT
    except ValueError:  # a name that is not bound yet
        return False


class Classes:
    """The classes of a step's modules and what they define, at the time this is made.

    Args:
        modules: that the step uses.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._of = [(module, type(module)) for module in modules]
        found = {cls: None for _, of in self._of for cls in of.__mro__ if cls not in (object, nn.Module)}
        self._defined = [(cls, [*vars(cls).values()]) for cls in found]

    def change(self) -> str | None:
        """Return the class that has changed, or None."""
        for module, of in self._of:
            if type(module) is not of:
                return f"a {of.__name__} became a {type(module).__name__}"
        for cls, before in self._defined:
            now = vars(cls).values()
            if len(now) != len(before) or not all(map(is_, now, before)):
                return f"the class {cls.__name__}, which the step uses, changed"
        return None
