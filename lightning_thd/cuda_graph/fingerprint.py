"""A module -> a record of what its graphs depend on, compared before every replay.

The record has the addresses of tensors, ``requires_grad``, classes and hooks. It also has the attributes of
modules and the values in their ``config`` and hyperparameters; of a LightningModule itself, only those that
the step reads. docs/guides/cuda-graphs.md lists what is not compared.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import lightning.pytorch as L
import torch
from lightning.fabric.utilities import AttributeDict
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torchmetrics import Metric

from lightning_thd._hooks import CALLED, registry_of
from lightning_thd._static import ONLY_LOOKS

PLAIN = (int, float, bool, str, type(None))
ABSENT = object()

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
# Attributes of these types are compared even if they are new since the capture.
_FOLLOWED = (*PLAIN, tuple, type, torch.dtype, *_FUNCTIONS)
_REGISTRIES = ("_parameters", "_buffers", "_modules")
# Attributes of every LightningModule, such as its Trainer, are not compared, except registries and this one.
USUAL = frozenset((*vars(nn.Module()), *vars(L.LightningModule()))) - {"training"}
_RECIPE = "_thd_fp8"

_get: Any = dict.get
_address: Any = Tensor.data_ptr
_requires_grad: Any = attrgetter("requires_grad")


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensor itself, or the tensors that a subclass wraps; a DTensor gives this rank's part."""
    wrapper: Any = tensor
    if not hasattr(type(wrapper), "__tensor_flatten__"):  # the protocol by which torch takes wrappers apart
        yield tensor
        return
    names, _ = wrapper.__tensor_flatten__()
    for name in names:
        inner = getattr(wrapper, name)
        if isinstance(inner, Tensor):  # a DTensor also lists its mesh
            yield from plain_tensors(inner)


def _has_one_address(tensor: Tensor) -> bool:
    """Return whether a tensor is plain, and not a subclass that wraps others."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def _addresses(tensor: Tensor) -> tuple[int, ...]:
    """Return the addresses of a tensor, or of the tensors that it wraps."""
    if _has_one_address(tensor):
        return (tensor.data_ptr(),)
    return tuple(x.data_ptr() for x in plain_tensors(tensor))


class Uses:
    """The attributes that a step reads and writes during its capture.

    Attributes:
        written: the attributes that the step sets, as (id of the module, name). They are not compared.
        read: the names of the LightningModule's attributes that the step reads. Only these are compared,
            because its hooks may change others. None for a module of another class.
    """

    def __init__(self, *others: Uses) -> None:
        self.written: set[tuple[int, str]] = set()
        self.read: set[str] | None = None
        for other in others:
            self.written |= other.written
            if other.read is not None:
                self.read = (self.read or set()) | other.read


@contextlib.contextmanager
def watched(module: nn.Module) -> Iterator[Uses]:
    """Record the attributes of a module that code in this context reads and writes; complete at its end."""
    uses = Uses()
    kind = type(module)
    attributes_before = {id(child): dict(vars(child)) for child in module.modules()}
    if isinstance(module, L.LightningModule):
        uses.read = set()
        module.__class__ = _noting_reads(kind, uses.read)
    try:
        yield uses
    finally:
        module.__class__ = kind

    for child in module.modules():
        before = attributes_before.get(id(child), {})
        for name, value in vars(child).items():
            if before.get(name, ABSENT) is not value:
                uses.written.add((id(child), name))


def _noting_reads(kind: Any, names: set[str]) -> Any:
    """Make a subclass whose instances add the name of every attribute that is read."""

    def get(self: Any, name: str) -> Any:
        names.add(name)
        return kind.__getattribute__(self, name)

    metaclass: Any = type(kind)
    return metaclass(kind.__name__, (kind,), {"__getattribute__": get, "__module__": kind.__module__})


class _Space(NamedTuple):
    """A dictionary that the step may read."""

    members: dict[Any, Any]
    label: str  # its name in messages
    is_registry: bool  # all members of a registry are compared, except hooks of ``only_looking``
    captured: frozenset[Any] = frozenset()  # names at the capture, compared for any type of value
    left_out: frozenset[str] = frozenset()  # names that are never compared
    read: set[str] | None = None  # if given, only these names are compared

    def counts(self, name: Any, value: Any) -> bool:
        """Return whether a member is compared."""
        if self.is_registry:
            return not getattr(value, ONLY_LOOKS, False)
        if name in self.left_out or (str(name).startswith("_thd_") and name != _RECIPE):
            return False
        if self.read is not None:
            return name in self.read
        return name in self.captured or isinstance(value, _FOLLOWED)


class Fingerprint:
    """The state of a module that is compared before every replay, for a step with the given ``uses``."""

    def __init__(self, module: nn.Module, uses: Uses) -> None:
        modules = dict(module.named_modules())
        self._remember_tensors(modules)

        metrics = {
            id(part) for child in modules.values() if isinstance(child, Metric) for part in child.modules()
        }
        compared = {path: child for path, child in modules.items() if id(child) not in metrics}
        self._modules = [*compared.values()]
        self._kinds = [*map(type, self._modules)]

        spaces = {}
        for kind in CALLED:
            hooks = getattr(nn_module, f"_global{registry_of(kind)}")
            spaces[id(hooks)] = _Space(hooks, "the hooks of every module", True)
        written: dict[int, set[str]] = {}
        for owner, name in uses.written:
            written.setdefault(owner, set()).add(name)
        for path, child in compared.items():
            left_out = USUAL.union(written.get(id(child), ()))
            read = uses.read if child is module else None
            for space in _spaces_of(path, child, left_out, read):
                spaces.setdefault(id(space.members), space)  # layers share a config
        self._spaces = [*spaces.values()]
        self._remember(self._members())

    def _remember_tensors(self, modules: dict[str, nn.Module]) -> None:
        """Record the parameters and buffers of the modules, with their addresses and ``requires_grad``."""
        self._owners: list[dict[str, Any]] = []  # the dictionary that holds each tensor
        self._names_of_tensors: list[str] = []
        self._tensors: list[Tensor] = []
        for child in modules.values():
            for owner in (child._parameters, child._buffers):
                for name, tensor in owner.items():
                    if tensor is not None:
                        self._owners.append(owner)
                        self._names_of_tensors.append(name)
                        self._tensors.append(tensor)
        self._trained = [*map(_requires_grad, self._tensors)]

        # Plain tensors are compared by a few calls of C for all of them, because there are hundreds.
        named = [*zip(self._names_of_tensors, self._tensors, strict=True)]
        plain = [(name, tensor) for name, tensor in named if _has_one_address(tensor)]
        self._plain_names = [name for name, _ in plain]
        self._plain = [tensor for _, tensor in plain]
        self._plain_addresses = [*map(_address, self._plain)]
        self._wrappers = [
            (name, tensor, _addresses(tensor)) for name, tensor in named if not _has_one_address(tensor)
        ]

    def change(self) -> str | None:
        """Return what has changed since the fingerprint was taken (the first difference found), or None."""
        # There are many tensors and attributes, so they are compared without a loop in Python.
        if not all(map(is_, map(_get, self._owners, self._names_of_tensors), self._tensors)):
            return self._moved()
        if [*map(_address, self._plain)] != self._plain_addresses or self._wrappers_moved():
            return self._moved()
        if [*map(_requires_grad, self._tensors)] != self._trained:
            tensors = zip(self._names_of_tensors, self._tensors, self._trained, strict=True)
            name = next(name for name, tensor, trained in tensors if tensor.requires_grad != trained)
            return f"{name}.requires_grad changed"
        if not all(map(is_, map(type, self._modules), self._kinds)):
            children = zip(self._modules, self._kinds, strict=True)
            child, kind = next((child, kind) for child, kind in children if type(child) is not kind)
            return f"a {kind.__name__} became a {type(child).__name__}"
        if self._same_names() and all(map(is_, map(_get, self._dicts, self._names), self._values)):
            return None

        members = self._members()
        for place in chain(self._captured, members):
            if not _is_same(members.get(place, ABSENT), self._captured.get(place, ABSENT)):
                index, name = place
                space = self._spaces[index]
                return f"{space.label} changed" if space.is_registry else f"{space.label}{name} changed"
        self._remember(members)  # only names that are not compared changed, or objects of equal value
        return None

    def _moved(self) -> str:
        """Return the first tensor that was replaced or has another address."""
        for owner, name, tensor in zip(self._owners, self._names_of_tensors, self._tensors, strict=True):
            if owner.get(name) is not tensor:
                return f"{name} moved to other memory"
        for name, tensor, address in zip(self._plain_names, self._plain, self._plain_addresses, strict=True):
            if tensor.data_ptr() != address:
                return f"{name} moved to other memory"
        name = next(name for name, tensor, addresses in self._wrappers if _addresses(tensor) != addresses)
        return f"{name} moved to other memory"

    def _wrappers_moved(self) -> bool:
        """Return whether a tensor inside a wrapper has another address."""
        return any(_addresses(tensor) != addresses for _, tensor, addresses in self._wrappers)

    def _same_names(self) -> bool:
        """Return whether no space has new names. A name that is added comes last in its dictionary."""
        if any(self._empty) or [*map(len, self._filled)] != self._sizes:
            return False
        return [*map(next, map(reversed, self._filled))] == self._last_names

    def _members(self) -> dict[tuple[int, Any], Any]:
        """Return the members that are compared, by the index of their space and their name."""
        return {
            (index, name): value
            for index, space in enumerate(self._spaces)
            for name, value in space.members.items()
            if space.counts(name, value)
        }

    def _remember(self, members: dict[tuple[int, Any], Any]) -> None:
        """Record the members, as lists that ``change`` compares without a loop in Python."""
        self._captured = members
        self._dicts = [self._spaces[index].members for index, _ in members]
        self._names = [name for _, name in members]
        self._values = [*members.values()]

        dicts = [space.members for space in self._spaces]
        self._empty = [space for space in dicts if not space]
        self._filled: list[Any] = [space for space in dicts if space]
        self._sizes = [*map(len, self._filled)]
        self._last_names = [*map(next, map(reversed, self._filled))]


def _spaces_of(
    path: str, child: nn.Module, left_out: frozenset[str], read: set[str] | None
) -> Iterator[_Space]:
    """Yield a module's registries, its attributes, and the values inside its settings."""
    attributes = vars(child)
    prefix = f"{path}." if path else ""
    for name in (*_REGISTRIES, *map(registry_of, CALLED)):
        if type(attributes.get(name)) in (dict, OrderedDict):  # a scripted module has other types
            yield _Space(attributes[name], f"{prefix}{name}", True)

    space = _Space(attributes, f"the attribute {prefix}", False, frozenset(attributes), left_out, read)
    yield space
    # The values inside a config, and inside the dicts in which Lightning saves hyperparameters, count too.
    for name, settings in attributes.items():
        is_of_settings = name == "config" or isinstance(settings, AttributeDict)
        if not is_of_settings or not space.counts(name, None):
            continue
        values = settings if isinstance(settings, dict) else getattr(settings, "__dict__", None)
        if isinstance(values, dict):
            yield _Space(values, f"the attribute {prefix}{name}.", False, frozenset(values))


def _is_same(value: Any, captured: Any) -> bool:
    """Return whether a value is the captured object, or a plain value that equals it."""
    if value is captured:
        return True
    return isinstance(captured, PLAIN) and type(value) is type(captured) and bool(value == captured)
