"""Jobs that write down what they use, to be killed: start, kill, and read what survived.

A rank appends a line "STEP ID ID ..." for every microbatch to OUT/ledger-NAME-RANK.txt.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_MARK = "THD_CHAOS_JOB"  # in the environment of every process of a job


def start(module: str, out: Path, ranks: int, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a job: ``python -m module OUT RANKS NAME ...``, under torchrun where it has several ranks."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    )
    job = [module, str(out), str(ranks), name, *arguments]
    with (out / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *launcher, "-m", *job],
            env={**os.environ, "OMP_NUM_THREADS": "1", _MARK: f"{out}/{name}"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def members(out: Path, name: str) -> list[int]:
    """List the living processes of a job: under torchrun its ranks lead sessions of their own."""
    mark, found = f"{_MARK}={out}/{name}\0".encode(), []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # not a process, or one that has just ended
            if process.name.isdigit() and mark in (process / "environ").read_bytes() + b"\0":
                found.append(int(process.name))
    return found


def kill(job: subprocess.Popen[bytes], out: Path, name: str) -> None:
    """End a job, all its ranks and their workers with SIGKILL."""
    while alive := members(out, name):
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    job.wait()


def lines(out: Path) -> int:
    """Microbatches written down so far, by all runs."""
    return sum(len(file.read_text().splitlines()) for file in out.glob("ledger-*.txt"))


def surviving_line(out: Path, names: list[str]) -> dict[int, list[int]]:
    """For every step, the sequences of the last run that began it."""
    steps: dict[int, list[int]] = {}
    for name in names:
        of_run: dict[int, list[int]] = {}
        for file in out.glob(f"ledger-{name}-*.txt"):
            for line in file.read_text().splitlines():
                step, *ids = map(int, line.split())
                of_run.setdefault(step, []).extend(ids)
        if of_run:
            steps = {step: ids for step, ids in steps.items() if step < min(of_run)} | of_run
    return steps


def run_until(job: subprocess.Popen[bytes], out: Path, goal: int, *, timeout_s: float = 120.0) -> None:
    """Wait for a number of lines, or for the end of the job."""
    deadline = time.monotonic() + timeout_s
    while lines(out) < goal and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
