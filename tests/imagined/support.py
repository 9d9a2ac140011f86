"""Scripts on an imagined GPU, each in a process of its own."""

from __future__ import annotations

import json
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scripts import finished

ROOT = Path(__file__).parent.parent.parent
_TORCH = "2.13"  # device.cpp implements an interface of C++ that other releases change


# Frames of ours below which a library reads: GradScaler, transformers' Trainer, vision towers, the loop over
# experts, and Lightning's barrier before ranks decide together.
_ABOVE_LIBRARIES = (
    *("optimizer_step", "hf_data.py", "models/announce.py", "experts_forward"),
    "nccl barrier strategies/mixin.py",
)
_ONCE = "flops/peaks.py"  # measures a peak


def why_not() -> str | None:
    """Return why this machine cannot imagine a GPU, or None if it can."""
    if not torch.__version__.startswith(_TORCH):
        return f"the imagined GPU is made for torch {_TORCH}, this is {torch.__version__}"
    if torch.version.cuda is not None or torch.version.hip is not None:
        return "the imagined GPU needs a CPU build of torch"
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"the imagined GPU runs on linux x86_64, this is {sys.platform} {platform.machine()}"
    return None if shutil.which("g++") else "the imagined GPU is compiled with g++, which is not installed"


needs_imagination = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def run(script: Path, *arguments: str, out: Path, capability: str = "9.0", timeout_s: float = 900) -> Any:
    """Run a script on an imagined GPU; return its reads and uploads a step, and what it printed."""
    file = out / "traffic.json"
    options = ("-c", capability, "--json", file)
    done = finished("-m", "tests.imagined.run", *options, script, *arguments, cwd=out, timeout_s=timeout_s)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return {**json.loads(file.read_text()), "printed": done.stdout + done.stderr}


def our_reads(traffic: Any) -> dict[str, float]:
    """Return the reads a step by a file of lightning_thd; paths of others name their package."""
    return {
        row: number
        for row, number in traffic["reads"].items()
        if _is_ours(row) and not _is_of_a_library(row) and _ONCE not in row
    }


def reads_of_experts(traffic: Any) -> dict[str, float]:
    """Return the reads a step by transformers' loop over the experts that tensor parallelism gave a rank."""
    return {
        row: number
        for row, number in traffic["reads"].items()
        if _is_of_a_library(row) and "experts_forward >" in row
    }


def our_uploads(traffic: Any) -> dict[str, float]:
    """Return the uploads a step whose caller is a file of lightning_thd."""
    return {row: number for row, number in traffic["uploads"].items() if _is_ours(row)}


def _is_of_a_library(row: str) -> bool:
    """Return whether a library reads, below one of our frames that let it."""
    place, below, _ = row.partition(" > ")
    return bool(below) and any(part in place for part in _ABOVE_LIBRARIES)


def _is_ours(row: str) -> bool:
    folders = {path.name for path in (ROOT / "lightning_thd").iterdir()}
    nearest, _, _ = row.partition(" > ")
    _, _, place = nearest.rpartition(":")[0].rpartition(" ")  # of torch's own backward there is none
    return place.split("/")[0] in folders and (ROOT / "lightning_thd" / place).exists()
