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

from lightning_thd._known_bad import known_problems
from lightning_thd.attention.support import SUPPORT
from lightning_thd.cli import doctor, main
from lightning_thd.cli.doctor import Diagnosis, diagnose
from tests.scripts import run_python


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
    reading = functools.partial(known_problems, version_of=versions.get)
    monkeypatch.setattr(doctor, "known_problems", reading)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told")
def test_without_a_gpu_only_the_cpu_kernel_runs_and_every_other_says_why() -> None:
    found = diagnose()
    assert found.packages["torch"] == metadata.version("torch")  # its __version__ adds the build, +cu130
    assert found.packages["tilelang"] is None
    assert [x.name for x in found.kernels if x.usable] == ["cpu", "portable"]
    for x in found.kernels:
        assert x.usable == (x.why_not == "")
    assert {x.name for x in found.kernels} >= set(SUPPORT)
    assert kernel(found, "torch").why_not == "there is no CUDA device"
    assert "pip install" in kernel(found, "te").why_not


def test_on_hopper_all_runs_but_what_is_known_to_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.11.0", "lightning": "2.6.6", "triton": "3.6.0", "fla-core": "0.6.0"}
    hopper(monkeypatch, versions)
    found = diagnose()
    assert found.machine["gpu 0"] == "NVIDIA H200, 150 GiB, compute capability 9.0"
    assert [x.name for x in found.kernels if not x.usable] == ["fused by flash-linear-attention"]
    assert "install triton>=3.7.1" in kernel(found, "fused by flash-linear-attention").why_not
    assert len(found.problems) == 1
    assert "PROBLEM  fla: flash-linear-attention refuses its gated backward" in str(found)
    versions["tilelang"] = "0.1.15"
    healthy = diagnose()
    assert all(x.usable for x in healthy.kernels)
    assert "No combination that is known to be bad." in str(healthy)


def test_a_gpu_that_a_kernel_is_not_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper(monkeypatch, {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (7, 5))
    found = diagnose()
    assert kernel(found, "flash3").why_not == "needs compute capability 9, this GPU has 7"
    assert not kernel(found, "torch").usable


BROKEN = """
import sys
sys.path.insert(0, sys.argv[1])
for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
    del sys.modules[name]
from lightning_thd.cli import main
main(["doctor", "--json"])
"""


def write_package(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    for path, text in {**files, f"{name}-{version}.dist-info/METADATA": ""}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text or f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told")
def test_wrong_builds_and_old_releases_are_told_what_to_do(tmp_path: Path) -> None:
    symbol = "/opt/site/flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationE"
    write_package(
        tmp_path,
        "flash_attn",
        "2.8.3",
        {
            "flash_attn/__init__.py": "from flash_attn.flash_attn_interface import flash_attn_func\n",
            "flash_attn/flash_attn_interface.py": f"raise ImportError({symbol!r})\n",
        },
    )
    write_package(tmp_path, "transformers", "4.57.1", {})
    write_package(tmp_path, "torchao", "0.18.0", {"torchao/__init__.py": "raise OSError('no such symbol')\n"})
    write_package(
        tmp_path, "mamba_ssm", "2.2.4", {"mamba_ssm/__init__.py": "import torch; torch.no_such_name\n"}
    )
    write_package(
        tmp_path, "causal_conv1d", "1.6.0", {"causal_conv1d/__init__.py": "import no_such_module\n"}
    )
    found = json.loads(run_python("-c", BROKEN, tmp_path))
    why = {x["name"]: x["why_not"] for x in found["kernels"]}
    assert why["flash2"] == (
        "flash_attn.flash_attn_interface is installed and does not import here (flash_attn_2_cuda.so: "
        "undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationE). Built for another torch or CUDA? Build it "
        "again: pip install --force-reinstall --no-deps --no-build-isolation flash-attn"
    )
    assert why["torchao"].endswith("Build it again: pip install --force-reinstall --no-deps torchao")
    assert "module 'torch' has no attribute 'no_such_name'" in why["fused by mamba-ssm"]
    assert "--force-reinstall --no-deps --no-build-isolation mamba-ssm" in why["fused by mamba-ssm"]
    assert why["fused by causal-conv1d"] == (
        "causal_conv1d does not import here (No module named 'no_such_module'): pip install no_such_module"
    )
    [mamba] = (x for x in found["problems"] if x.startswith("mamba"))
    assert mamba.startswith("mamba_ssm: transformers hands no seq_idx to the fused Mamba-2 kernels")


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    shown = capsys.readouterr().out
    assert "attention backend='flash': flash3" in shown
    assert metadata.version("torch") in shown
    main(["doctor", "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert set(found) == {"machine", "packages", "kernels", "problems"}
    assert found["packages"]["torch"] == metadata.version("torch")
    assert {"serves", "name", "usable", "why_not"} == set(found["kernels"][0])
