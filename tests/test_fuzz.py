"""Public functions answer, or raise ValueError or TypeError; ``python -m tests.fuzz 10000`` tries more."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import lightning_thd
from tests.fuzz import fuzz, tables

# Public names without an entry, and why.
_ANSWER = "what a function answers: nobody makes one"
_BASE = "a base class whose arguments are Lightning's"
EXCEPTIONS = {
    "KernelCall": "what Boundaries.call answers",
    "LogProbs": _ANSWER,
    "TokenStats": _ANSWER,
    "LengthSummary": _ANSWER,
    "DynamicBins": _ANSWER,
    "PackingReport": _ANSWER,
    "LintReport": _ANSWER,
    "Op": _ANSWER,
    "BatchMaker": "what THDDataModule makes of a set; examples/one_step_by_hand.py shows it",
    "PlannedSteps": "what THDDataModule makes of a plan",
    "THDLoader": "what THDDataModule makes of planned steps",
    "prepare": "takes any model and refuses by family; tests/models tries every one",
    "register_family": "takes a function that adapts a model; tests/models and docs/guides/families.md",
    "build_index": "THDDataModule calls it with a user's rows, which the entry of THDDataModule tries",
    "Vision": "what a FlopsModel answers about its tower; collate takes it back",
    "THDStrategyMixin": _BASE,
}


def _public(module: ModuleType) -> Iterator[str]:
    """Name the functions and classes a module gives out, and those of modules it gives out."""
    for name in module.__all__:
        attribute: Any = getattr(module, name)
        if inspect.ismodule(attribute):
            mine = [n for n, value in vars(attribute).items() if inspect.isfunction(value)]
            yield from (
                n
                for n in mine
                if not n.startswith("_") and getattr(attribute, n).__module__ == attribute.__name__
            )
        elif inspect.isfunction(attribute) or inspect.isclass(attribute):
            no_arguments = inspect.isclass(attribute) and issubclass(attribute, BaseException)
            if not no_arguments and not getattr(attribute, "_is_protocol", False):
                yield name


def test_every_public_function_has_an_entry() -> None:
    names: set[str] = set()
    for info in pkgutil.walk_packages(lightning_thd.__path__, "lightning_thd."):
        needs_triton = info.name == "lightning_thd.loss.kernels.rows"
        if not needs_triton and not any(part.startswith("_") for part in info.name.split(".")):
            module = importlib.import_module(info.name)
            names |= set(_public(module)) if hasattr(module, "__all__") else set()
    tried = {word for name in tables() for word in re.split(r"[^\w]+", name)}
    assert len(names) > 90
    assert sorted(names - tried - set(EXCEPTIONS)) == []
    assert sorted(set(EXCEPTIONS) - names | set(EXCEPTIONS) & tried) == []


def test_five_hundred_calls() -> None:
    outcomes, failures = fuzz(500)
    assert failures == []
    assert outcomes["answered"] > 100
    assert outcomes["ValueError"] + outcomes["TypeError"] > 100


@pytest.mark.slow
def test_ten_thousand_calls() -> None:
    assert fuzz(10_000, seed=1)[1] == []
