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
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torchmetrics import Metric

from lightning_thd._static import ONLY_LOOKS

PLAIN = (int, float, bool, str, type(None))
ABSENT = object()

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
# Attributes of these types are compared even if they are new since the capture.
_FOLLOWED = (*PLAIN, tuple, type, torch.dtype, *_FUNCTIONS)
_SETTINGS = ("config", "_hparams")  # The values inside these are compared, too.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_REGISTRIES = ("_parameters", "_buffers", "_modules", *_HOOKS)
# Attributes of every LightningModule, such as its Trainer, are not compared, except registries and these two.
USUAL = frozenset((*vars(nn.Module()), *vars(L.LightningModule()))) - {"training", "_hparams"}
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
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def _addresses(tensor: Tensor) -> tuple[int, ...]:
    if _has_one_address(tensor):
        return (tensor.data_ptr(),)
    return tuple(x.data_ptr() for x in plain_tensors(tensor))


class Uses:
    """The attributes that a step reads and writes during its capture."""

    # ``written``: (id of the module, name) of the attributes that the step sets. They are not compared.
    # ``read``: names of the LightningModule's attributes that the step reads. Only these are compared: its
    # hooks may change others. ``read`` is None for a module of another class.
    def __init__(self, *others: Uses) -> None:
        self.written: set[tuple[int, str]] = {place for other in others for place in other.written}
        read = [other.read for other in others if other.read is not None]
        self.read: set[str] | None = set().union(*read) if read else None


@contextlib.contextmanager
def watched(module: nn.Module) -> Iterator[Uses]:
    """Record the attributes of a module that code in this context reads and writes; complete at its end."""
    uses, kind = Uses(), type(module)
    before = {id(child): dict(vars(child)) for child in module.modules()}
    if isinstance(module, L.LightningModule):
        names = uses.read = set()

        def get(self: Any, name: str) -> Any:
            names.add(name)
            return kind.__getattribute__(self, name)

        space = {"__getattribute__": get, "__module__": kind.__module__}
        metaclass: Any = type(kind)
        module.__class__ = metaclass(kind.__name__, (kind,), space)
    try:
        yield uses
    finally:
        module.__class__ = kind
    for child in module.modules():
        old = before.get(id(child), {})
        uses.written.update(
            (id(child), name) for name, x in vars(child).items() if old.get(name, ABSENT) is not x
        )


class _Space(NamedTuple):
    """A dictionary that the step may read."""

    held: dict[Any, Any]
    what: str  # its name in messages
    whole: bool  # True for a registry: all its members are compared, except hooks of ``only_looking``
    known: frozenset[Any] = frozenset()  # names at the capture, compared for any type of value
    left_out: frozenset[str] = frozenset()  # names that are never compared
    read: set[str] | None = None  # if given, only these names are compared

    def counts(self, name: Any, value: Any) -> bool:
        """Return whether a member is compared."""
        if self.whole:
            return not getattr(value, ONLY_LOOKS, False)
        if name in self.left_out or (str(name).startswith("_thd_") and name != _RECIPE):
            return False
        if self.read is not None:
            return name in self.read
        return name in self.known or isinstance(value, _FOLLOWED)


class Fingerprint:
    """The state of a module that is compared before every replay, for a step with the given ``uses``."""

    def __init__(self, module: nn.Module, uses: Uses) -> None:
        modules = dict(module.named_modules())
        places = [
            (held, name, x)
            for child in modules.values()
            for held in (child._parameters, child._buffers)
            for name, x in held.items()
            if x is not None
        ]
        # Plain tensors are compared by a few calls of C for all of them, because there are hundreds.
        plain = [(name, x) for _, name, x in places if _has_one_address(x)]
        self._plain_names = [name for name, _ in plain]
        self._plain = [x for _, x in plain]
        self._plain_addresses = [*map(_address, self._plain)]
        self._wrappers = [(name, x, _addresses(x)) for _, name, x in places if not _has_one_address(x)]
        self._names_of_tensors = [name for _, name, _ in places]
        self._owned = [x for _, _, x in places]
        self._owners = [held for held, _, _ in places]
        self._trained = [*map(_requires_grad, self._owned)]
        metrics = {id(x) for child in modules.values() if isinstance(child, Metric) for x in child.modules()}
        used = {path: child for path, child in modules.items() if id(child) not in metrics}
        self._used = [*used.values()]
        self._kinds = [*map(type, self._used)]
        written: dict[int, set[str]] = {}
        for owner, name in uses.written:
            written.setdefault(owner, set()).add(name)
        hooks = (getattr(nn_module, f"_global{name}") for name in _HOOKS)
        spaces = {id(held): _Space(held, "the hooks of every module", True) for held in hooks}
        for path, child in used.items():
            left_out = USUAL.union(written.get(id(child), ()))
            for space in _spaces_of(path, child, left_out, uses.read if child is module else None):
                spaces.setdefault(id(space.held), space)  # layers share a config
        self._spaces = [*spaces.values()]
        self._remember(self._members())

    def change(self) -> str | None:
        """Return what has changed since the fingerprint was taken (the first difference found), or None."""
        # There are many tensors and attributes, so they are compared without a loop in Python.
        if not all(map(is_, map(_get, self._owners, self._names_of_tensors), self._owned)):
            return self._moved()
        if [*map(_address, self._plain)] != self._plain_addresses or self._wrappers_moved():
            return self._moved()
        if [*map(_requires_grad, self._owned)] != self._trained:
            pairs = zip(self._names_of_tensors, self._owned, self._trained, strict=True)
            name = next(name for name, x, wanted in pairs if x.requires_grad != wanted)
            return f"{name}.requires_grad changed"
        if not all(map(is_, map(type, self._used), self._kinds)):
            children = zip(self._used, self._kinds, strict=True)
            child, kind = next((child, kind) for child, kind in children if type(child) is not kind)
            return f"a {kind.__name__} became a {type(child).__name__}"
        if self._same_names() and all(map(is_, map(_get, self._held, self._names), self._values)):
            return None
        now = self._members()
        for place in chain(self._before, now):
            if not _is_same(now.get(place, ABSENT), self._before.get(place, ABSENT)):
                index, name = place
                space = self._spaces[index]
                return f"{space.what} changed" if space.whole else f"{space.what}{name} changed"
        self._remember(now)  # only names that are not compared changed, or objects of equal value
        return None

    def _moved(self) -> str:
        """Return the first tensor that was replaced or has another address."""
        for held, name, tensor in zip(self._owners, self._names_of_tensors, self._owned, strict=True):
            if held.get(name) is not tensor:
                return f"{name} moved to other memory"
        for name, tensor, where in zip(self._plain_names, self._plain, self._plain_addresses, strict=True):
            if tensor.data_ptr() != where:
                return f"{name} moved to other memory"
        name = next(name for name, tensor, where in self._wrappers if _addresses(tensor) != where)
        return f"{name} moved to other memory"

    def _wrappers_moved(self) -> bool:
        return any(_addresses(tensor) != where for _, tensor, where in self._wrappers)

    def _same_names(self) -> bool:
        """Return whether no space has new names. A name that is added comes last in its dictionary."""
        if any(self._empty) or [*map(len, self._filled)] != self._sizes:
            return False
        return [*map(next, map(reversed, self._filled))] == self._last_names

    def _members(self) -> dict[tuple[int, Any], Any]:
        return {
            (i, name): value
            for i, space in enumerate(self._spaces)
            for name, value in space.held.items()
            if space.counts(name, value)
        }

    def _remember(self, members: dict[tuple[int, Any], Any]) -> None:
        self._before = members
        held = [space.held for space in self._spaces]
        self._empty = [space for space in held if not space]
        self._filled: list[Any] = [space for space in held if space]
        self._sizes = [*map(len, self._filled)]
        self._last_names = [*map(next, map(reversed, self._filled))]
        self._held = [self._spaces[index].held for index, _ in members]
        self._names = [name for _, name in members]
        self._values = [*members.values()]


def _spaces_of(
    path: str, child: nn.Module, left_out: frozenset[str], read: set[str] | None
) -> Iterator[_Space]:
    """Yield a module's registries, its attributes, and the values inside its settings."""
    held, prefix = vars(child), f"{path}." if path else ""
    for name in _REGISTRIES:
        if type(held.get(name)) in (dict, OrderedDict):  # a scripted module has other types
            yield _Space(held[name], f"{prefix}{name}", True)
    attributes = _Space(held, f"the attribute {prefix}", False, frozenset(held), left_out, read)
    yield attributes
    for name in _SETTINGS:
        settings = held.get(name) if attributes.counts(name, None) else None
        inside = settings if isinstance(settings, dict) else getattr(settings, "__dict__", None)
        if isinstance(inside, dict):
            yield _Space(inside, f"the attribute {prefix}{name}.", False, frozenset(inside))


def _is_same(now: Any, before: Any) -> bool:
    return now is before or (isinstance(before, PLAIN) and type(now) is type(before) and bool(now == before))
