"""One rank of four is killed in the middle of a step: the job ends with an error in time, and resumes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks
from tests.strategies import kill_job
from tests.strategies.jobs import Layout, train
from tests.tiny import largest_error


def start(out: Path, dp: int, cp: int) -> subprocess.Popen[bytes]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={dp * cp}"]
    command = [sys.executable, *launcher, "-m", "tests.strategies.kill_job", str(out), str(dp), str(cp)]
    with (out / "log.txt").open("ab") as log:
        return subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=subprocess.STDOUT
        )


def wait_for_step(ledger: Path, step: int, job: subprocess.Popen[bytes]) -> int:
    """Wait until a rank has begun a step; returns its process id."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and job.poll() is None:
        lines = ledger.read_text().split("\n")[:-1] if ledger.exists() else []
        if lines and int(lines[-1].split()[1]) >= step:
            return int(lines[-1].split()[0])
        time.sleep(0.02)
    raise AssertionError(f"step {step} never began")


@pytest.mark.slow
def test_one_rank_dies_and_the_job_goes_on(tmp_path: Path) -> None:
    job = start(tmp_path, 2, 2)
    os.kill(wait_for_step(tmp_path / "ledger-1.txt", 5, job), signal.SIGKILL)
    killed = time.monotonic()
    assert job.wait(120) != 0
    assert time.monotonic() - killed < 60  # the timeout of 20 s, and torchrun's own 30 s to stop the others
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()
    assert start(tmp_path, 4, 1).wait(240) == 0, (tmp_path / "log.txt").read_text()[-4000:]
    found = torch.load(tmp_path / "final.pt")
    at = Layout()
    wanted = run_ranks(alone, 1, at)[0]
    assert largest_error(found, wanted) < 1e-10


def alone(layout: Layout) -> dict[str, torch.Tensor]:
    from lightning_thd import Sequences

    result = train("qwen3", layout, Sequences(12), torch.float64, {"max_steps": kill_job.STEPS})
    params: dict[str, torch.Tensor] = result["params"]
    return params
