"""Oracles that were computed before are read again, and computed again for other inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gpu_oracles
from tests import oracles
from tests.models import matrix
from tests.oracles import FOLDER, kept
from tests.strategies import jobs
from tests.strategies.layouts import LAYOUTS


class Slow:
    """An oracle that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, Any]:
        self.calls += 1
        return {"loss": torch.ones((), dtype=torch.float64), "losses": [1.0, 2.0]}


def test_an_oracle_is_computed_once_for_each_name_and_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow()
    weights = {"weight": torch.arange(4.0)}
    kept("slow", weights, slow)
    assert (slow.calls, list(tmp_path.iterdir())) == (1, []), "without a folder nothing is kept"

    monkeypatch.setenv(FOLDER, str(tmp_path))
    first = kept("slow", weights, slow)
    again = kept("slow", weights, slow)
    assert slow.calls == 2
    assert torch.equal(first["loss"], again["loss"])
    assert again["losses"] == first["losses"]

    kept("slow in fp64", weights, slow)
    kept("slow", {"weight": torch.arange(4.0) + 1}, slow)
    kept("slow", {"weight": torch.arange(4.0).bfloat16()}, slow)
    assert slow.calls == 5

    monkeypatch.setattr(oracles, "code", lambda: "another")
    kept("slow", weights, slow)
    assert slow.calls == 6


def test_families_and_layouts_take_their_oracles_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_oracles, "FAMILIES", {"qwen3": None})
    monkeypatch.setattr(gpu_oracles, "LAYOUTS", {"ddp": LAYOUTS["ddp"]})
    gpu_oracles.main(["--out", str(tmp_path)])
    assert "3 oracles" in capsys.readouterr().out

    def refuse(*_: object, **__: object) -> Tensor:
        raise AssertionError("computed again")

    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(matrix, "result_of", refuse)
    monkeypatch.setattr(jobs, "train_alone", refuse)
    matrix.oracle.cache_clear()
    _, result = matrix.oracle("qwen3")
    matrix.oracle.cache_clear()
    assert len(result.logits) > 3
    family, layout, step = LAYOUTS["ddp"]
    for dtype in (torch.float64, torch.float32):
        trained = jobs.train_by_hand(family, layout, step, dtype)
        assert len(trained["losses"]) == jobs.STEPS
        assert all(value.dtype == dtype for value in trained["params"].values())
