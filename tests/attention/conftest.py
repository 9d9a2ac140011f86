from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_thd.attention import entry
from tests.attention import standins


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """CPU tensors pass for CUDA tensors, so that doubles of GPU libraries are chosen; none is installed."""
    monkeypatch.setattr(entry, "_device_type", lambda x: "cuda")
    standins.forget()
    yield monkeypatch
    monkeypatch.undo()
    standins.forget()
