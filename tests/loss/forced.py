"""Kernels of the losses on the CPU: the real ones under Triton's interpreter, else their stand-in in torch.

``TRITON_INTERPRET=1 python -m pytest -p tests.loss.forced tests/loss/test_fused.py`` runs a suite so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest import mock

import numpy as np
import pytest

from lightning_thd.loss.tiles import logits, products, trial

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@contextmanager
def kernels_forced(*, interpreted: bool = INTERPRETED) -> Iterator[list[str]]:
    """Let kernels serve every device, and yield the names of those that are launched, in order."""
    if interpreted:
        np.seterr(all="ignore")  # the interpreter also computes lanes that are masked out
        from lightning_thd.loss.kernels import rows
    else:
        from tests.loss import rows_in_torch as rows  # type: ignore[no-redef]

    calls: list[str] = []
    with (
        module_replaced("lightning_thd.loss.kernels.rows", rows),
        mock.patch("lightning_thd.loss.kernels.rows", rows, create=True),
        mock.patch.object(logits, "runs_triton", return_value=True),
        # a GPU widens no product of bf16 afterwards, nor does it compute rows again
        mock.patch.object(products, "cpu_multiplies_bf16", return_value=False),
        _trials_forgotten(),
        _watched(rows, calls),
    ):
        yield calls


@contextmanager
def _trials_forgotten() -> Iterator[None]:
    """Forget the trials of kernels, before and afterwards."""
    trial._trial.cache_clear()
    try:
        yield
    finally:
        trial._trial.cache_clear()


@contextmanager
def module_replaced(name: str, module: ModuleType) -> Iterator[None]:
    """Put a module in the place of another; what is imported meanwhile stays, unlike under ``patch.dict``."""
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


@contextmanager
def _watched(rows: object, calls: list[str]) -> Iterator[None]:
    def watched(name: str) -> object:
        launch = getattr(rows, name)

        def counted(*args: object) -> None:
            calls.append(name)
            launch(*args)

        return counted

    names = ("nll", "statistics", "gradient", "divergence_terms", "divergence_gradient")
    with mock.patch.multiple(rows, **{name: watched(name) for name in names}):
        yield


def pytest_configure(config: pytest.Config) -> None:
    if INTERPRETED:  # the interpreter's own numpy, which a newer release refuses
        config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim")


@pytest.fixture(autouse=True)
def forced() -> Iterator[list[str]]:
    with kernels_forced() as calls:
        yield calls
