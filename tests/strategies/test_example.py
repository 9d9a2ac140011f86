"""examples/parallel.py gives the same loss on one process, on four in any layout, and on two nodes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOSS = r"dp \d x cp \d x tp \d: step \d+, loss ([\d.]+)"
TORCHRUN = ["-m", "torch.distributed.run"]


def start(launcher: list[str], arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *launcher, "examples/parallel.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def loss_of(job: subprocess.Popen[str]) -> float | None:
    out, err = job.communicate(timeout=240)
    assert job.returncode == 0, err[-4000:]
    match = re.search(LOSS, out)
    return float(match.group(1)) if match else None


@pytest.mark.slow
def test_four_processes_in_any_layout() -> None:
    expected = loss_of(start([], []))
    for arguments in (["--cp", "2"], ["--cp", "2", "--tp", "2"], ["--tp", "2"]):
        loss = loss_of(start([*TORCHRUN, "--standalone", "--nproc-per-node=4"], arguments))
        assert loss == pytest.approx(expected, abs=2e-4)  # fp32, printed to four digits
