from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_thd.attention import entry, support
from tests.attention import standins


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """CPU tensors pass for CUDA tensors, so that doubles of GPU libraries are chosen; none is installed."""
    describe = entry.describe

    def describe_on_cuda(*args: Any, **kwargs: Any) -> support.Request:
        return replace(describe(*args, **kwargs), device="cuda")

    monkeypatch.setattr(entry, "describe", describe_on_cuda)
    monkeypatch.setattr(support, "_device", lambda request: torch.device("cpu"))
    standins.forget()
    yield monkeypatch
    monkeypatch.undo()
    standins.forget()
