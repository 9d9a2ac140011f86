"""Real Triton kernels on the CPU, by ``make test-kernels``; without TRITON_INTERPRET=1 nothing runs here.

The interpreter runs a kernel's Python on numpy arrays, one program after the other. What it lacks is made up
for here: there is no driver that could measure configurations, and no device to switch to.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    # Mamba-1 and the convolution are CUDA alone, and what is tested imports them at its top.
    for _name in ("selective_scan_cuda", "causal_conv1d_cuda"):
        sys.modules.setdefault(_name, types.ModuleType(_name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no device for Triton
        import fla.ops.gated_delta_rule  # noqa: F401


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the kernels that ran, with their errors against the oracle."""
    terminalreporter.section("kernels run by the interpreter, relative error in fp32")
    for report in terminalreporter.getreports("passed"):
        for what, error in report.user_properties:
            terminalreporter.line(f"{what}: {error:.1e}")


def counted(*limits: Any) -> Iterator[Any]:
    """Count as a kernel's loop does when it is compiled: in Triton's scalars, which have methods."""
    from triton.runtime import interpreter

    for number in range(*limits):
        yield interpreter._implicit_cvt(number)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the first configuration of a kernel, and stay on the CPU."""
    from fla.ops.common import chunk_delta_h
    from triton.runtime.autotuner import Autotuner

    monkeypatch.setattr(Autotuner, "_bench", lambda *args, **kwargs: [1.0, 1.0, 1.0])
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    properties = types.SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(chunk_delta_h, "range", counted, raising=False)
