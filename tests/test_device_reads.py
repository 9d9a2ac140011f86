"""GPU tests run with warnings as errors: what warns by itself on a device is called in one place."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

import pytest
import torch

from tests.device_reads import no_waiting

TESTS = Path(__file__).parent


def test_the_mode_is_set_and_given_back_without_its_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[object] = [0]

    def set_mode(mode: object) -> None:
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)
        modes.append(mode)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with pytest.raises(KeyError), no_waiting():
        raise KeyError
    assert modes == [0, "error", 0]


def test_no_test_sets_the_mode_by_itself() -> None:
    found = [
        file.name
        for file in TESTS.rglob("*.py")
        if re.search(r"torch\.cuda\.set_sync_debug_mode\(", file.read_text())
    ]
    assert found == ["device_reads.py"]


def test_cublas_has_the_workspace_that_deterministic_products_want() -> None:
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"]
