"""A module and a step -> the modules that the step uses, and their attributes that are constants to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import lightning.pytorch as L
from torch import nn

PLAIN = (int, float, bool, str, type(None))
ABSENT = object()


@dataclass(frozen=True, slots=True)
class Reads:
    """The modules a step uses and the attributes it reads of them, by identity: a metric's hash is its state.

    Attributes:
        modules: by id.
        constants: (module, name of the attribute), by id and name.
    """

    modules: dict[int, nn.Module] = field(default_factory=dict)
    constants: dict[tuple[int, str], tuple[nn.Module, str]] = field(default_factory=dict)

    def __or__(self, other: Reads) -> Reads:
        return Reads(self.modules | other.modules, self.constants | other.constants)

    def inside(self, modules: set[int]) -> Reads:
        """Return those of the modules with these ids."""
        return Reads(
            {key: child for key, child in self.modules.items() if key in modules},
            {key: read for key, read in self.constants.items() if key[0] in modules},
        )


@contextlib.contextmanager
def reads_of(module: nn.Module) -> Iterator[Reads]:
    """Record what is used of ``module`` and its submodules inside this context.

    Args:
        module: watched through ``nn.Module`` itself, so that the types of modules stay what they are.

    Yields:
        What was used so far: of ``self.alpha`` in a step the module and its attribute ``"alpha"``;
        submodules, parameters, buffers, what the classes define and what every module has are no constants.
        At the end methods and what was set meanwhile are none either, and what a compiled module holds
        counts as used.
    """
    reads = Reads()
    before = {id(child): dict(vars(child)) for child in module.modules()}
    usual, read = _usual_names(), object.__getattribute__

    def spy(self: Any, name: str) -> Any:
        value = read(self, name)
        key = (id(self), name)
        if key[0] in before:
            reads.modules[key[0]] = self
            if key not in reads.constants and name not in usual and name in read(self, "__dict__"):
                reads.constants[key] = (self, name)
        return value

    everywhere: Any = nn.Module
    everywhere.__getattribute__ = spy
    try:
        yield reads
    finally:
        del everywhere.__getattribute__
        for key, (child, name) in [*reads.constants.items()]:
            value = vars(child).get(name, ABSENT)
            if callable(value) or value is ABSENT or value is not before[key[0]].get(name, ABSENT):
                del reads.constants[key]
        for child in [*reads.modules.values()]:
            if child._compiled_call_impl is not None or "_orig_mod" in child._modules:
                reads.modules.update((id(inner), inner) for inner in child.modules())


@lru_cache(maxsize=1)
def _usual_names() -> frozenset[str]:
    """Return what every module has: its registries, its Trainer, what it logs."""
    return frozenset((*vars(nn.Module()), *vars(L.LightningModule()), "__dict__")) - {"_hparams"}
