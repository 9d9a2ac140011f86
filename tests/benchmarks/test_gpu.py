"""``python -m benchmarks.gpu``: its plan, and a run of pretended parts that loses its device."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_parts
from benchmarks.gpu_parts import Part, in_order

FAKE = "tests.benchmarks.fake_parts"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Part]:
    """An empty registry for parts of a test."""
    monkeypatch.setattr(gpu_parts, "PARTS", {})
    monkeypatch.delitem(sys.modules, FAKE, raising=False)
    return gpu_parts.PARTS


def start(folder: Path, *arguments: str) -> int:
    return gpu.main(["--device", "any", "--modules", FAKE, "--out", str(folder), *arguments])


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_what_it_would_run_and_why_it_cannot(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert gpu.main(["--budget", "1", "--out", str(tmp_path / "none")]) == 2
    said = capsys.readouterr()
    assert "attention_equal      60 s   run: every backend equals fp64" in said.out
    assert "cuda_graph          110 s   left out: takes about 110 s, and 0 s are left" in said.out
    assert "No CUDA device: torch" in said.err
    assert gpu.main(["--plan"]) == 0
    assert not (tmp_path / "none").exists()


def test_the_plan_of_nine_minutes_holds_the_most_telling_parts() -> None:
    gpu.main(["--plan"])
    parts = in_order()
    assert [x.name for x in parts[:5]] == [
        "attention_equal",
        "test_attention",
        "test_cuda_graph",
        "cuda_graph",
        "train_125m",
    ]
    fates = {x.name: fate for x, fate in gpu.plan(parts, budget_s=540.0, done=set())}
    for name in ("train_7b", "loss_big_head", "loss_fp8_products", "test_loss"):
        assert fates[name] == "run"
    assert sum(x.seconds for x in parts if fates[x.name] == "run") <= 540.0
    every = gpu.plan(parts, budget_s=1800.0, done={"cuda_graph"})
    assert {fate for x, fate in every if x.name != "cuda_graph"} == {"run"}
    assert {x.name: fate for x, fate in every}["cuda_graph"] == "done"


def read(folder: Path, name: str) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return kept


@pytest.mark.slow
def test_a_lost_device_ends_one_part_and_a_second_run_goes_on(
    registry: dict[str, Part],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu, "LEAST_S", 30.0)
    assert start(tmp_path, "--parts", "good", "device_lost", "after", "endless", "large") == 1
    table = capsys.readouterr().out
    assert read(tmp_path, "good")["rows"] == [
        {"case": "a case", "value": 1.25, "unit": "x", "goal": ">= 1", "met": True}
    ]
    lost = read(tmp_path, "device_lost")
    assert lost["rows"][0]["value"] == 2.0  # what came before is on disk
    assert "illegal memory access" in lost["problem"]
    assert not lost["finished"]
    assert read(tmp_path, "after")["rows"][0]["met"] is False
    endless = read(tmp_path, "endless")
    assert endless["problem"] == "ran past 30 s"
    assert endless["rows"][0]["case"] == "begun"
    assert "| good | a case | 1.25 | x | >= 1 | yes |" in table
    assert "| after | late | 0.5 | x | >= 1 | NO |" in table
    assert "large: left out: takes about 1000000 s" in table
    assert not (tmp_path / "large.json").exists()
    assert start(tmp_path, "--plan") == 0
    planned = capsys.readouterr().out
    assert "good                  1 s   done" in planned
    assert "device_lost           1 s   run" in planned
    assert "endless               1 s   run" in planned


def test_findings_of_another_device_are_not_taken_for_this_ones(tmp_path: Path) -> None:
    kept = {"part": "good", "finished": True, "about": {"device": "another"}, "rows": [], "problem": ""}
    (tmp_path / "good.json").write_text(json.dumps(kept))
    assert gpu.finished(tmp_path, gpu.about("any")) == set()
    assert gpu.finished(tmp_path, {"device": "another"}) == {"good"}


def test_the_last_line_of_pytest_is_counted() -> None:
    rows = gpu._test_rows("...\n= 12 passed, 2 failed, 3 skipped, 1 error in 4.2s =".replace("= ", ""))
    assert [(row.case, row.value, row.met) for row in rows] == [
        ("tests passed", 12, None),
        ("tests failed", 3, False),
        ("tests skipped", 3, None),
    ]


def test_rows_of_the_readme_are_proved_by_every_comparison_of_their_kernel() -> None:
    def row(case: str, met: bool) -> dict[str, Any]:
        return {"case": case, "met": met}

    rows = [row("torch, causal, 64", True), row("torch, sinks, 64", True), row("flash2, causal, 64", False)]
    proved = gpu.proved_rows({"attention_equal": {"rows": [*rows, row("flash2, sinks, 64", True)]}})
    assert len(proved) == 1
    assert proved[0].startswith("| torch | torch | cuda |")
    assert proved[0].endswith("proved by 2 comparisons")
    assert gpu.proved_rows({}) == []


def test_a_name_is_registered_once_and_unknown_ones_are_named(
    registry: dict[str, Part], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_parts.part("twice", shows="", seconds=1, rank=1)(lambda: iter(()))
    with pytest.raises(ValueError, match="Part 'twice' is registered twice"):
        gpu_parts.part("twice", shows="", seconds=1, rank=1)(lambda: iter(()))
    assert start(tmp_path, "--parts", "fast") == 2
    assert "No part 'fast'. Parts: twice, good" in capsys.readouterr().err
