"""``lightning-thd doctor``: everything it says about a machine, on this one and on made-up ones."""

from __future__ import annotations

import functools
import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_thd._imports import trouble
from lightning_thd._known_bad import known_problems
from lightning_thd._versions import SUPPORTED, releases_of
from lightning_thd.attention.support import SUPPORT
from lightning_thd.cli import doctor, main
from lightning_thd.cli.doctor import Diagnosis, diagnose


def kernel(found: Diagnosis, name: str) -> doctor.Kernel:
    return next(x for x in found.kernels if x.name == name)


def hopper(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    """A machine with one H200 and everything installed, in the versions given."""
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=150 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(doctor, "available", lambda name: True)
    monkeypatch.setattr(doctor, "missing", lambda kernel: None)
    monkeypatch.setattr(doctor, "installed_version", versions.get)
    monkeypatch.setattr(doctor, "known_problems", functools.partial(known_problems, version_of=versions.get))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told")
def test_without_a_gpu_only_the_cpu_kernel_runs_and_every_other_says_why() -> None:
    report = diagnose()
    assert report.packages["torch"] == metadata.version("torch")  # its __version__ adds the build, +cu130
    assert report.packages["tilelang"] is None
    assert [x.name for x in report.kernels if x.usable] == ["cpu", "portable"]
    assert all(x.usable == (x.why_not == "") for x in report.kernels)
    assert {x.name for x in report.kernels} >= set(SUPPORT)
    assert kernel(report, "torch").why_not == "there is no CUDA device"
    assert "pip install" in kernel(report, "te").why_not
    assert report.problems == []


def test_on_hopper_all_runs_but_what_is_known_to_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.11.0", "lightning": "2.6.6", "triton": "3.6.0", "fla-core": "0.6.0"}
    hopper(monkeypatch, versions)
    report = diagnose()
    assert report.machine["gpu 0"] == "NVIDIA H200, 150 GiB, compute capability 9.0"
    assert [x.name for x in report.kernels if not x.usable] == ["fused by flash-linear-attention"]
    assert "install triton>=3.7.1" in kernel(report, "fused by flash-linear-attention").why_not
    assert len(report.problems) == 1
    versions["tilelang"] = "0.1.15"
    assert all(x.usable for x in diagnose().kernels)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (7, 5))
    report = diagnose()
    assert kernel(report, "flash3").why_not == "needs compute capability 9, this GPU has 7"
    assert not any(kernel(report, name).usable for name in ("torch", "torchao", "transformer-engine"))


def test_releases_outside_the_tested_ones_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed = {"torch": "99.1.0", "transformers": "5.18.2", "trl": "1.0.0"}
    monkeypatch.setattr(doctor, "installed_version", installed.get)
    newest = SUPPORTED["torch"].newest
    oldest = SUPPORTED["transformers"].oldest
    assert diagnose().untested == [
        f"torch 99.1.0 is newer than {newest}, the newest release that the tests ran with.",
        f"transformers 5.18.2 is too old: install {oldest} or newer.",
    ]
    main(["doctor"])
    shown = capsys.readouterr().out
    assert "UNTESTED" in shown
    assert f"tested: {releases_of('trl')}" in shown


def test_a_build_for_another_torch_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "causal_conv1d.py").write_text("raise OSError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    assert "does not import here (undefined symbol)" in str(trouble("causal_conv1d"))
    assert "pip install flash-linear" in str(trouble("fla.ops"))


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    shown = capsys.readouterr().out
    assert "attention backend='flash': flash3" in shown
    assert metadata.version("torch") in shown
    main(["doctor", "--json"])
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert set(printed) == {"machine", "packages", "tested", "untested", "kernels", "problems"}
    assert printed["packages"]["torch"] == metadata.version("torch")
    assert {"serves", "name", "usable", "why_not"} == set(printed["kernels"][0])
