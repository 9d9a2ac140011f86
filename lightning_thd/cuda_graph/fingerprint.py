"""A module and its step -> what their graphs have baked in, compared before every replay.

A replay runs no Python: it uses the layers, hooks, numbers and addresses of the capture. So everything that
the step can read is compared before each replay: the memory of tensors, ``requires_grad``, train and eval,
hooks, classes, and every attribute, global and enclosed name in code that the step can reach. That code is
found once, by following names from the step and the modules' ``forward`` to the functions they name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from operator import is_
from os.path import dirname
from typing import Any, TypeVar

import lightning.pytorch as L
import torch.ao.nn
from torch import Tensor, nn
from torch.nn.modules import module as every_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torchmetrics import Metric

from lightning_thd._user_code import is_users
from lightning_thd.cuda_graph.errors import is_machinery

PLAIN = (int, float, bool, str, type(None))
ABSENT = object()

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
# Every module has these: its registries, its Trainer, what it logs. They change without changing a step.
_USUAL = frozenset((*vars(nn.Module()), *vars(L.LightningModule()))) - {"_hparams"}
_OWN = dirname(dirname(__file__))
_TORCH_MODULES = (dirname(nn.modules.__file__), dirname(torch.ao.nn.__file__))
_CODE = (types.FunctionType, types.BuiltinFunctionType, type)
# These are compared by identity: a function's code does not change, and tensors and modules are compared
# on their own.
_WHOLE = (Tensor, nn.Module, type, types.ModuleType, logging.Logger, *_CODE, types.MethodType)
_INSIDE = ("lightning_thd.models.", "lightning_thd.precision.", "lightning_thd.parallel.tensor")
_MOST = 1000  # A container of more entries is compared by its size.
_DEPTH = 4  # Settings nested deeper than this are compared by identity.
_CALLED = frozenset(("__init__", "__call__", "forward", "backward"))  # Code calls these without naming them.

F = TypeVar("F")
_get: Any = dict.get


def only_looking(hook: F) -> F:
    """Mark a hook that changes nothing that the step computes: graphs stay when it comes and goes."""
    setattr(hook, _LOOKS, True)
    return hook


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensor itself, or those that a subclass wraps: a DTensor gives this rank's shard."""
    wrapper: Any = tensor
    if not is_traceable_wrapper_subclass(wrapper):
        yield tensor
        return
    names, _ = wrapper.__tensor_flatten__()
    for name in names:
        inner = getattr(wrapper, name)
        if isinstance(inner, Tensor):  # a DTensor names its mesh, too
            yield from plain_tensors(inner)


def _addresses(tensor: Tensor) -> tuple[int, ...]:
    # Most tensors are plain, and this runs every step.
    if type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__:
        return (tensor.data_ptr(),)
    return tuple(x.data_ptr() for x in plain_tensors(tensor))


@contextlib.contextmanager
def written_by(module: nn.Module) -> Iterator[set[tuple[int, str]]]:
    """Yield a set that holds, after this context, the attributes that were set in it: (id, name)."""
    before = {id(child): dict(vars(child)) for child in module.modules()}
    written: set[tuple[int, str]] = set()
    yield written
    for child in module.modules():
        old = before.get(id(child), {})
        written.update((id(child), name) for name, x in vars(child).items() if old.get(name, ABSENT) is not x)


class Fingerprint:
    """Everything that a graph has baked in of a module and of the step ``function`` that trains it.

    ``written`` are attributes that the step sets itself, from ``written_by``; they are no constants to it.
    """

    def __init__(self, module: nn.Module, function: Any, written: Iterable[tuple[int, str]] = ()) -> None:
        modules = list(module.named_modules())
        self._tensors = [
            (held, name, x, _addresses(x), x.requires_grad)
            for _, child in modules
            for held in (child._parameters, child._buffers)
            for name, x in held.items()
            if x is not None
        ]
        metrics = {id(x) for _, child in modules if isinstance(child, Metric) for x in child.modules()}
        used = [(path, child) for path, child in modules if id(child) not in metrics]
        functions, self._names = _reachable(function, [child for _, child in used])
        self._children = [child for _, child in used]
        self._kinds = [*map(type, self._children)]
        # Every member of these tables must stay, and none may come: registries of modules, and classes.
        self._tables: list[tuple[Mapping[Any, Any], str]] = []
        self._values: list[tuple[dict[str, Any], str, Any, str]] = []  # held by name, with the message
        self._insides: dict[
            int, tuple[Callable[[], Any], frozenset[str], list[Any], str]
        ] = {}  # what containers and configs hold
        self._absent: list[tuple[dict[str, Any], int, frozenset[str], str]] = []
        ours, written = _names_of_ours(), frozenset(written)
        for path, child in used:
            self._watch_module(path, child, ours, written)
        hooks = [
            getattr(every_module, f"_global{name}") for name, what in _REGISTRIES.items() if what == "hooks"
        ]
        self._tables += [(held, "the hooks of every module changed") for held in hooks]
        mro = {cls: None for kind in self._kinds for cls in kind.__mro__ if cls not in (object, nn.Module)}
        self._tables += [
            (vars(cls), f"the class {cls.__name__}, which the step uses, changed") for cls in mro
        ]
        for space, name, value in _globals_of(functions):
            self._watch(space, name, value, f"the global {name}, which the step reads,", self._names)
        for name, cell in _cells_of(functions):
            text = f"{name}, which the step takes from around it, changed"
            before = _flat(cell.cell_contents, self._names)
            self._insides[id(cell)] = partial(getattr, cell, "cell_contents"), self._names, before, text
        self._working = [_working(held) for held, _ in self._tables]
        self._members = self._members_now()
        self._spaces, self._keys, self._held = ([x[i] for x in self._values] for i in range(3))

    def _watch_module(
        self, path: str, child: nn.Module, ours: frozenset[str], written: frozenset[tuple[int, str]]
    ) -> None:
        held, prefix, where = vars(child), f"{path}." if path else "", path or "the module"
        self._values.append((held, "training", child.training, "a module changed between train() and eval()"))
        for name, what in _REGISTRIES.items():
            if type(held.get(name)) in (dict, OrderedDict):  # a scripted module has others
                self._tables.append((held[name], f"the {what} of {where} changed"))
        # This package reads attributes of models, and none of the user's LightningModule.
        read = (self._names if isinstance(child, L.LightningModule) else self._names | ours) - _USUAL | {
            "forward"
        }
        for name, value in held.items():
            private = name.startswith("_thd_") and name != "_thd_fp8"
            if name in read and not private and (id(child), name) not in written:
                what = f"the attribute {prefix}{name}, which the step reads,"
                self._watch(held, name, value, what, self._names | ours)
        self._absent.append((held, len(held), read - held.keys(), prefix))

    def _watch(self, held: dict[str, Any], name: str, value: Any, what: str, names: frozenset[str]) -> None:
        self._values.append((held, name, value, f"{what} changed"))
        if (
            not isinstance(value, (*PLAIN, *_WHOLE)) and id(value) not in self._insides
        ):  # layers share a config
            inside = f"what {what} holds has changed"
            self._insides[id(value)] = partial(held.get, name), names, _flat(value, names), inside

    def change(self) -> str | None:
        """Return the first thing that has changed since the fingerprint was taken, or None."""
        return next(self._changes(), None)

    def _changes(self) -> Iterator[str]:
        for held, name, tensor, where, wanted in self._tensors:
            if held.get(name) is not tensor or _addresses(tensor) != where:
                yield f"{name} moved to other memory"
            if tensor.requires_grad != wanted:
                yield f"{name}.requires_grad changed"
        for child, kind in zip(self._children, self._kinds, strict=True):
            if type(child) is not kind:
                yield f"a {kind.__name__} became a {type(child).__name__}"
        sizes, members = self._members_now()  # without a loop in Python: this runs every step
        if sizes != self._members[0] or not all(map(is_, members, self._members[1])):
            for (held, text), before in zip(self._tables, self._working, strict=True):
                if not _are_same(is_, _working(held), before):
                    yield text
            self._members = sizes, members  # hooks that only look have come or gone
        for space, size, absent, prefix in self._absent:
            if len(space) != size and (new := [name for name in space if name in absent]):
                yield f"the attribute {prefix}{new[0]}, which the step reads, is new"
        if not all(map(is_, map(_get, self._spaces, self._keys), self._held)):
            for space, name, value, text in self._values:
                if not _is_same(space.get(name, ABSENT), value):
                    yield text
        for value_of, names, before, text in self._insides.values():
            if not _are_same(_is_same, _flat(value_of(), names), before):
                yield text

    def _members_now(self) -> tuple[list[int], list[Any]]:
        tables = [held for held, _ in self._tables]
        return [*map(len, tables)], [*chain.from_iterable(held.values() for held in tables)]


def _working(held: Mapping[Any, Any]) -> list[Any]:
    return [member for member in held.values() if not getattr(member, _LOOKS, False)]


def _are_same(same: Callable[[Any, Any], bool], now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(same, now, before))


def _is_same(now: Any, before: Any) -> bool:
    """Return whether a value is the one before, or an equal plain one of its type: 2.0 is another than 2."""
    plain = isinstance(before, (*PLAIN, frozenset))
    return now is before or (plain and type(now) is type(before) and bool(now == before))


def _flat(value: Any, names: frozenset[str]) -> list[Any]:
    """List a value and all that it holds, to a depth of four."""
    found: list[Any] = []
    seen: set[int] = set()

    def walk(value: Any, depth: int) -> None:
        found.append(value)
        if isinstance(value, (*PLAIN, *_WHOLE)) or depth < 0 or id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, set | frozenset):
            found.append(frozenset(x for x in value if isinstance(x, PLAIN)))
            return
        members = _held_by(value, names)
        found.append(len(members))
        if len(found) + len(members) <= _MOST:
            for key, member in members:
                found.append(key)
                walk(member, depth - 1)

    walk(value, _DEPTH)
    return found


def _held_by(value: Any, names: frozenset[str]) -> list[tuple[Any, Any]]:
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
    renamed = set(getattr(value, "attribute_map", {}).values())  # configs of transformers
    return [(name, x) for name, x in held.items() if name in names or name in renamed]


def _reachable(function: Any, modules: list[nn.Module]) -> tuple[list[types.FunctionType], frozenset[str]]:
    """Return the functions that a step can reach, and all names and texts in their code."""
    places = {type(module).__module__ for module in modules}  # ours too: CausalLMModule has a step
    packages = places | {name.partition(".")[0] for name in places} - {"lightning_thd"}
    held = [x for module in modules for x in vars(module).values()]
    classes: set[type] = set()
    met: set[type] = {cls for module in modules for cls in type(module).__mro__ if cls is not nn.Module}
    while not met <= classes:  # a class that is met late may define what was named before
        classes |= met
        members = [(name, x) for cls in classes for name, x in vars(cls).items()]
        methods: dict[str, list[Any]] = {}
        for name, value in members:
            if name != "__init__":  # no step builds its modules
                methods.setdefault(name, []).append(value)
        waiting = [function, *methods.get("forward", ()), *held]
        found: dict[int, Any] = {}
        names = {"_hparams"}  # the property ``hparams`` of Lightning reads it
        while waiting:
            value = waiting.pop()
            if isinstance(value, (*PLAIN, Tensor, nn.Module)) or id(value) in found:
                continue
            found[id(value)] = value  # not its code, which all functions of a decorator share
            if not isinstance(value, types.FunctionType):
                waiting += _inside(value, met)
            elif not _is_followed(value, packages):
                if value.__code__.co_filename.startswith(_OWN):  # perhaps a wrapper around the step
                    waiting += _cell_values(value)
            else:
                used = _names_in(value.__code__)
                names |= used | _names_in(value.__code__, texts=True)
                for name in used:
                    waiting += methods.get(name, ())
                    named = value.__globals__.get(name)
                    waiting.append(named)
                    if isinstance(named, types.ModuleType):
                        waiting += [vars(named)[x] for x in used & vars(named).keys()]
                waiting += _cell_values(value)
    functions = [x for x in found.values() if isinstance(x, types.FunctionType)]
    return [x for x in functions if _is_followed(x, packages)], frozenset(names)


def _inside(value: Any, met: set[type]) -> list[Any]:
    """List what may hold functions in a value; add the user's classes that it is of to ``met``."""
    if isinstance(value, types.MethodType | staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, dict | list | tuple):  # a library's tables reach all of its code
        members = [*value.values()] if isinstance(value, dict) else [*value]
        return [x for x in members if not isinstance(x, types.FunctionType) or _is_users(x)]
    of = value if isinstance(value, type) else type(value)
    if not _is_users(of):
        return []
    met.update(cls for cls in of.__mro__ if cls is not object)
    if isinstance(value, type):
        return [] if issubclass(value, nn.Module) else [vars(value)[n] for n in _CALLED & vars(value).keys()]
    held = getattr(value, "__dict__", None)
    return [*held.values()] if isinstance(held, dict) else []


def _is_users(defined: Any) -> bool:
    """Return whether a function or class is defined in a file of the user's, or typed in."""
    if isinstance(defined, types.FunctionType):
        return _is_users_file(defined.__code__.co_filename)
    name = getattr(defined, "__module__", None)
    file = getattr(sys.modules.get(name or ""), "__file__", None)
    return name == "__main__" if file is None else is_users(file)


def _is_users_file(file: str) -> bool:
    return file.startswith("<") or is_users(file)  # "<stdin>" and the like are code that the user typed


def _cell_values(function: types.FunctionType) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)]


def _is_followed(function: types.FunctionType, packages: set[str]) -> bool:
    """Return whether a function is the user's, or of a package that defines modules, torch's own included."""
    file = function.__code__.co_filename
    name = function.__module__ or ""
    defines = name in packages or name.partition(".")[0] in packages
    return _is_users_file(file) or (defines and (file.startswith(_TORCH_MODULES) or not is_machinery(file)))


def _names_in(code: types.CodeType, *, texts: bool = False) -> frozenset[str]:
    """Return the names, or texts, in a function's code and in the functions it defines."""
    inner = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    own = [x for x in code.co_consts if isinstance(x, str)] if texts else code.co_names
    return frozenset(own).union(*(_names_in(x, texts=texts) for x in inner))


def _names_of_ours() -> frozenset[str]:
    """Return the names and texts in this package's code that runs inside of models."""
    names: set[str] = set()
    for path, module in list(sys.modules.items()):
        if path.startswith(_INSIDE):
            held = [*vars(module).values()]
            held += [x for cls in held if isinstance(cls, type) for x in vars(cls).values()]
            for function in (x for x in held if isinstance(x, types.FunctionType) and x.__module__ == path):
                names |= _names_in(function.__code__) | _names_in(function.__code__, texts=True)
    return frozenset(names)


def _globals_of(functions: list[types.FunctionType]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield the globals that functions read, and those of users' modules that they name, each once."""
    seen: set[tuple[int, str]] = set()
    for function in functions:
        file, used = function.__code__.co_filename, _names_in(function.__code__)
        if file.startswith(_OWN):
            continue
        named = [function.__globals__.get(name) for name in used]
        spaces = [function.__globals__, *(vars(x) for x in named if isinstance(x, types.ModuleType))]
        for space in spaces:
            theirs = not _is_users_file(str(space.get("__file__") or file))
            for name in used & space.keys():
                value = space[name]
                if (id(space), name) in seen or isinstance(value, types.ModuleType):
                    continue
                seen.add((id(space), name))
                if isinstance(value, _CODE) or not theirs:
                    yield space, name, value


def _cells_of(functions: list[types.FunctionType]) -> Iterator[tuple[str, types.CellType]]:
    """Yield the cells of users' functions, but for those that hold modules, by name."""
    for function in functions:
        if _is_users_file(function.__code__.co_filename):
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                if name != "__class__" and _is_set(cell) and not isinstance(cell.cell_contents, nn.Module):
                    yield name, cell


def _is_set(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not ABSENT
    except ValueError:  # a name that is not bound yet
        return False
