from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lightning_thd.attention import entry, support
from tests.attention import standins


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """CPU tensors pass for CUDA tensors, so that doubles of GPU libraries are chosen; none is installed."""
    monkeypatch.setattr(entry, "_device_type", lambda x: "cuda")
    monkeypatch.setattr(support, "_device", lambda request: torch.device("cpu"))
    standins.forget()
    yield monkeypatch
    monkeypatch.undo()
    standins.forget()
