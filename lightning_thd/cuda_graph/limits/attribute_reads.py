"""A module and a step -> the modules that the step uses, and their attributes that are constants to it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import lightning.pytorch as L
from torch import nn

from lightning_thd.cuda_graph.errors import is_foreign

PLAIN = (int, float, bool, str, type(None))
ABSENT = object()


def is_same(now: Any, before: Any) -> bool:
    """Return whether a value is the one before, or an equal plain one of its type: 2.0 is another than 2."""
    return now is before or (isinstance(before, PLAIN) and type(now) is type(before) and now == before)


@dataclass(frozen=True, slots=True)
class Reads:
    """The modules a step uses and the attributes it reads of them, by identity: a metric's hash is its state.

    Attributes:
        modules: by id.
        constants: (module, name of the attribute), by id and name.
        absent: (module, name) that it looked for on the module itself and found on its class or nowhere.
        code: functions of users that ran, and the globals that they see, by id of their code.
    """

    modules: dict[int, nn.Module] = field(default_factory=dict)
    constants: dict[tuple[int, str], tuple[nn.Module, str]] = field(default_factory=dict)
    absent: dict[tuple[int, str], tuple[nn.Module, str]] = field(default_factory=dict)
    code: dict[int, tuple[CodeType, dict[str, Any]]] = field(default_factory=dict)

    def __or__(self, other: Reads) -> Reads:
        return Reads(
            self.modules | other.modules,
            self.constants | other.constants,
            self.absent | other.absent,
            self.code | other.code,
        )

    def inside(self, modules: set[int]) -> Reads:
        """Return those of the modules with these ids."""
        return Reads(
            {key: child for key, child in self.modules.items() if key in modules},
            {key: read for key, read in self.constants.items() if key[0] in modules},
            {key: read for key, read in self.absent.items() if key[0] in modules},
            self.code,
        )


@contextlib.contextmanager
def reads_of(module: nn.Module) -> Iterator[Reads]:
    """Record what is used of ``module`` and its submodules inside this context.

    Args:
        module: watched through ``nn.Module`` itself, so that the types of modules stay what they are.

    Yields:
        What was used so far: of ``self.alpha`` in a step the module and its attribute ``"alpha"``;
        submodules, parameters, buffers, what the classes define and what every module has are no constants.
        At the end what was set meanwhile is none either, and what a compiled module holds counts as used.
    """
    reads = Reads()
    before = {id(child): dict(vars(child)) for child in module.modules()}
    usual, read = _usual_names(), object.__getattribute__

    def spy(self: Any, name: str) -> Any:
        key = (id(self), name)
        if key[0] in before:
            reads.modules[key[0]] = self
            if key not in reads.constants and name not in usual:
                found = reads.constants if name in read(self, "__dict__") else reads.absent
                found[key] = (self, name)
        return read(self, name)

    everywhere: Any = nn.Module
    everywhere.__getattribute__ = spy
    try:
        with _calls(reads.code):
            yield reads
    finally:
        del everywhere.__getattribute__
        for key, (child, name) in [*reads.constants.items()]:
            value = vars(child).get(name, ABSENT)
            if value is ABSENT or value is not before[key[0]].get(name, ABSENT) or name == "forward":
                del reads.constants[key]
        for child in [*reads.modules.values()]:
            if child._compiled_call_impl is not None or "_orig_mod" in child._modules:
                reads.modules.update((id(inner), inner) for inner in child.modules())


@contextlib.contextmanager
def _calls(code: dict[int, tuple[CodeType, dict[str, Any]]]) -> Iterator[None]:
    """Record the code of users' and libraries' functions that run in this context, unless a profiler runs."""

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and id(frame.f_code) not in code and is_foreign(frame):
            code[id(frame.f_code)] = (frame.f_code, frame.f_globals)

    if sys.getprofile() is not None:
        yield
        return
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


@lru_cache(maxsize=1)
def _usual_names() -> frozenset[str]:
    """Return what every module has: its registries, its Trainer, what it logs."""
    return frozenset((*vars(nn.Module()), *vars(L.LightningModule()), "__dict__")) - {"_hparams"}
