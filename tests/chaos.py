"""Jobs that write down what they use, to be killed: start, kill, and read what survived.

A rank appends a line "STEP ID ID ..." for every microbatch to OUT/ledger-NAME-RANK.txt.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.ranks import environment_of, forkserver, join_ranks

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


class ForkedJob:
    """The same job, its ranks forked where torch is imported already, which saves ten seconds a rank.

    Every rank leads a process group, which the processes of its loader join.
    """

    def __init__(self, module: str, out: Path, ranks: int, name: str, *arguments: str) -> None:
        store = out / f"store-{name}"
        self.ranks = [
            forkserver().Process(target=_forked, args=(module, [out, ranks, name, *arguments], rank, store))
            for rank in range(ranks)
        ]
        for process in self.ranks:
            process.start()

    def poll(self) -> int | None:
        codes = [process.exitcode for process in self.ranks]
        return None if None in codes else max(map(abs, codes))

    def wait(self, timeout_s: float) -> int | None:
        for process in self.ranks:
            process.join(timeout_s)
        return self.poll()

    def kill(self) -> None:
        """End all ranks and their loaders' processes with SIGKILL."""
        for process in self.ranks:
            process.kill()
            with contextlib.suppress(ProcessLookupError):  # it had not begun
                os.killpg(process.pid, signal.SIGKILL)
            process.join()


def _forked(module: str, arguments: list[object], rank: int, store: Path) -> None:
    out = Path(str(arguments[0]))
    ranks = int(str(arguments[1]))
    name = arguments[2]
    os.setpgid(0, 0)
    log = os.open(out / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if ranks > 1:
        os.environ.update(environment_of(rank, ranks))
        join_ranks(rank, ranks, store)
    sys.argv = [module, *map(str, arguments)]
    importlib.import_module(module).main()
    sys.stdout.flush()
    os._exit(0)  # skips gloo's teardown, which may wait for peers that are gone


def members(out: Path, name: str) -> list[int]:
    """List the living processes of a job: under torchrun its ranks lead sessions of their own."""
    mark = f"{_MARK}={out}/{name}\0".encode()
    pids = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # not a process, or one that has just ended
            if process.name.isdigit() and mark in (process / "environ").read_bytes() + b"\0":
                pids.append(int(process.name))
    return pids


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


def run_until(
    job: subprocess.Popen[bytes] | ForkedJob, out: Path, goal: int, *, timeout_s: float = 120.0
) -> None:
    """Wait for a number of lines, or for the end of the job."""
    deadline = time.monotonic() + timeout_s
    while lines(out) < goal and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
