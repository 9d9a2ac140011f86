from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import Part, Row


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Part]:
    """An empty registry, and a device to pretend with."""
    monkeypatch.setattr(gpu, "PARTS", {})
    monkeypatch.setattr(gpu, "MODULES", [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a pretended device")
    return gpu.PARTS


def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert gpu.main([]) == 2
    assert "No CUDA device" in capsys.readouterr().err


def test_parts_fit_into_the_time_and_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert {"attention_equal", "attention_speed"} <= set(gpu.PARTS)
    assert all(name in listed for name in gpu.PARTS)
    assert sum(part.seconds for part in gpu.PARTS.values()) < gpu.TOTAL_S


def test_results_go_into_one_json_and_one_table(
    parts: dict[str, Part], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @gpu.part("good", shows="a goal met", seconds=1)
    def good() -> Iterator[Row]:
        yield Row(case="a case", value=1.25, unit="x", goal=">= 1", met=True)

    @gpu.part("broken", shows="a failure", seconds=1)
    def broken() -> Iterator[Row]:
        yield Row(case="before", value=2.0, unit="us")
        raise RuntimeError("no such kernel\nmore")

    @gpu.part("endless", shows="no time for it", seconds=1e6)
    def endless() -> Iterator[Row]:
        raise AssertionError("must not run")
        yield

    file = tmp_path / "gpu.json"
    assert gpu.main(["--json", str(file)]) == 1
    saved = json.loads(file.read_text())
    assert saved["device"] == "a pretended device"
    assert [part["part"] for part in saved["parts"]] == ["good", "broken", "endless"]
    assert saved["parts"][1]["problem"] == "RuntimeError: no such kernel"
    assert saved["parts"][1]["rows"][0]["value"] == 2.0
    assert saved["parts"][2]["problem"].startswith("left out: needs about 1000000 s")
    table = capsys.readouterr().out
    assert "| good | a case | 1.25 | x | >= 1 | yes |" in table
    assert "| broken | RuntimeError: no such kernel | | | | NO |" in table
    assert gpu.main(["--parts", "good", "--json", str(file)]) == 0


def test_a_name_is_registered_once(parts: dict[str, Part]) -> None:
    register = gpu.part("twice", shows="", seconds=1)
    register(lambda: iter(()))
    with pytest.raises(ValueError, match="Part 'twice' is registered twice"):
        register(lambda: iter(()))
