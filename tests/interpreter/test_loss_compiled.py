"""The kernels of the losses, compiled for sm_90: the interpreter lets pass what does not compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Registers of a multiprocessor of compute capability 9.0 (CUDA C programming guide, table of capabilities).
REGISTERS = 65_536


@pytest.mark.slow
def test_kernels_compile_without_spills_and_with_wide_loads() -> None:
    """The interpreter replaces the compiler in its process, so another process compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.interpreter.compile_rows"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    reports = json.loads(ran.stdout)
    assert len(reports) == 36
    for name, kernel in reports.items():
        assert kernel["spills"] == 0, (name, kernel)
        # two programs of a multiprocessor hide the latency of each other's loads
        assert 2 * kernel["threads"] * kernel["registers"] <= REGISTERS, (name, kernel)
        assert kernel["wide_loads"] > 0, (name, kernel)
        writes_rows = not name.startswith(("statistics", "divergence"))
        assert kernel["wide_stores"] > 0 or not writes_rows, (name, kernel)
