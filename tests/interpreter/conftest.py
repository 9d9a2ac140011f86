"""Real Triton kernels on the CPU, by ``make test-kernels``; without TRITON_INTERPRET=1 nothing runs here."""

from __future__ import annotations

import contextlib
import os
import sys
import types
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_thd._imports import installed

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    # Mamba-1 and the convolution are CUDA alone, and what is tested imports them at its top.
    for _name in ("selective_scan_cuda", "causal_conv1d_cuda"):
        sys.modules.setdefault(_name, types.ModuleType(_name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no device for Triton
        if installed("fla"):
            import fla.ops.gated_delta_rule  # noqa: F401
        else:  # the losses need Triton alone
            collect_ignore_glob = ["test_kernels.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the kernels that ran, with their errors against the oracle; in the file KERNELS_REPORT, too."""
    terminalreporter.section("kernels run by the interpreter, relative error in fp32")
    rows = [row for report in terminalreporter.getreports("passed") for row in report.user_properties]
    for what, error in rows:
        terminalreporter.line(f"{what}: {error:.1e}")
    file = os.environ.get("KERNELS_REPORT")
    if file and rows:
        Path(file).write_text(_report(rows))


def _report(rows: list[tuple[str, float]]) -> str:
    names = ("triton", "numpy", "torch", "fla-core", "mamba-ssm", "liger-kernel")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    lines = "\n".join(f"| {what} | {error:.1e} |" for what, error in rows)
    return f"""# Kernels run for real on a CPU by Triton's interpreter

`KERNELS_REPORT=benchmarks/KERNELS.md make test-kernels`, {datetime.now(UTC).date()}: {versions}.
fp32, a pack of 4 sequences, against fp64 a step at a time and a sequence at a time.

| kernel | relative error |
| --- | ---: |
{lines}
"""


def counted(*limits: Any) -> Iterator[Any]:
    """Count as a kernel's loop does when it is compiled: in Triton's scalars, which have methods."""
    from triton.runtime import interpreter

    for number in range(*limits):
        yield interpreter._implicit_cvt(number)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the first configuration of a kernel, and stay on the CPU."""
    if not installed("fla"):
        return
    from fla.ops.common import chunk_delta_h
    from triton.runtime.autotuner import Autotuner

    monkeypatch.setattr(Autotuner, "_bench", lambda *args, **kwargs: [1.0, 1.0, 1.0])
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    properties = types.SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(chunk_delta_h, "range", counted, raising=False)
