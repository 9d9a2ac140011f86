from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from lightning_thd.attention import entry
from lightning_thd.attention.support import Request
from tests.attention import standins


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """CPU tensors pass for CUDA tensors, so that doubles of GPU libraries are chosen; none is installed."""
    described = entry.describe

    def describe(*given: Any, **options: Any) -> Request:
        return replace(described(*given, **options), device="cuda")

    monkeypatch.setattr(entry, "describe", describe)
    standins.forget()
    yield monkeypatch
    monkeypatch.undo()
    standins.forget()
