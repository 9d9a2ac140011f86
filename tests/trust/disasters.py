"""A running job of ``tests.chaos_job`` -> what is left of it after a disaster of one kind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.chaos import kill, lines, members, run_until, start

JOB = "tests.chaos_job"
END_S = 60.0  # from the death of a part to the end of the whole
ORPHAN_S = 20.0  # workers look for their parent every few seconds


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a disaster strikes: the job's folder, its name, ranks, loader processes, and the dice."""

    out: Path
    name: str
    ranks: int
    workers: int
    rng: random.Random

    def start(self, fault: str = "") -> subprocess.Popen[bytes]:
        return start(JOB, self.out, self.ranks, self.name, str(self.workers), fault)

    def end(self, job: subprocess.Popen[bytes]) -> None:
        kill(job, self.out, self.name)

    def let_it_run(self, job: subprocess.Popen[bytes]) -> None:
        run_until(job, self.out, lines(self.out) + self.rng.randint(1, 12 * self.ranks))
        time.sleep(self.rng.random() * 0.3)

    @property
    def log(self) -> str:
        return (self.out / f"{self.name}.log").read_text(errors="replace")

    @property
    def last(self) -> Path:
        return self.out / "checkpoints" / "last.ckpt"


def whole_job(scene: Scene) -> None:
    """SIGKILL everything at once."""
    job = scene.start()
    scene.let_it_run(job)
    scene.end(job)


def one_rank(scene: Scene) -> None:
    """SIGKILL one rank: the others end with an error."""
    job = scene.start()
    scene.let_it_run(job)
    ranks = children(job.pid) if scene.ranks > 1 else [job.pid]
    _kill_one(scene, job, ranks)


def one_worker(scene: Scene) -> None:
    """SIGKILL one process of a loader: its rank ends with an error, and so do the others."""
    job = scene.start()
    scene.let_it_run(job)
    ranks = children(job.pid) if scene.ranks > 1 else [job.pid]
    _kill_one(scene, job, [worker for rank in ranks for worker in children(rank)])


def while_it_saves(scene: Scene) -> None:
    """SIGKILL everything within milliseconds of a checkpoint's first byte."""
    job = scene.start()
    scene.let_it_run(job)
    folder = scene.last.parent
    before = _stamps(folder)
    deadline = time.monotonic() + 60
    while _stamps(folder) == before and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.0005)
    time.sleep(scene.rng.random() * 0.01)
    scene.end(job)


def full_disk(scene: Scene) -> None:
    """Let no file grow from some step on: the job ends with the system's error."""
    job = scene.start(f"disk:{scene.rng.randint(1, 30)}")
    code = job.wait(240)
    assert code != 0 or (scene.out / "final.pt").exists(), scene.log
    if code != 0:
        assert "File too large" in scene.log, scene.log


def cut_checkpoint(scene: Scene) -> None:
    """Cut the last checkpoint in half: a resume from it fails, one from the checkpoint beside it works."""
    if not scene.last.exists():
        return whole_job(scene)
    others = [file for file in scene.last.parent.glob("*.ckpt") if file != scene.last]
    with scene.last.open("r+b") as file:
        file.truncate(scene.last.stat().st_size // 2)
    assert scene.start().wait(240) != 0, "half a checkpoint was read without an error"
    newest = max(others, key=lambda file: file.stat().st_mtime)
    scene.last.unlink()
    os.link(newest, scene.last)
    return None


def wrong_clock(scene: Scene) -> None:
    """Let the wall clock jump by days, then SIGKILL everything."""
    job = scene.start("clock")
    scene.let_it_run(job)
    scene.end(job)


KINDS: dict[str, Callable[[Scene], None]] = {
    "SIGKILL of the whole job": whole_job,
    "SIGKILL of one rank": one_rank,
    "SIGKILL of one loader process": one_worker,
    "SIGKILL while it saves": while_it_saves,
    "full disk at a checkpoint": full_disk,
    "checkpoint cut in half": cut_checkpoint,
    "clock that jumps by a day": wrong_clock,
}


def children(pid: int) -> list[int]:
    """List the child processes of a process."""
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(line) for line in listed.stdout.split()]


def left_behind(out: Path, name: str, within_s: float = ORPHAN_S) -> list[int]:
    """List the processes of a job that are still there after a while."""
    deadline = time.monotonic() + within_s
    while (alive := members(out, name)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return alive


def _kill_one(scene: Scene, job: subprocess.Popen[bytes], candidates: list[int]) -> None:
    """SIGKILL one of some processes, and wait for the end of the whole job."""
    if not candidates or job.poll() is not None:  # the epoch was over before
        scene.end(job)
        return
    os.kill(scene.rng.choice(candidates), signal.SIGKILL)
    try:
        code = job.wait(END_S)
    except subprocess.TimeoutExpired:
        scene.end(job)
        raise AssertionError(
            f"the job went on or hung {END_S:.0f} s after the death of a part:\n{scene.log}"
        ) from None
    assert code != 0 or (scene.out / "final.pt").exists(), "the job lost a part and said nothing"
    orphans = left_behind(scene.out, scene.name)
    assert not orphans, f"left behind: {orphans}"


def _stamps(folder: Path) -> dict[str, int]:
    """Read names and times of what stands in a folder of checkpoints."""
    stamps = {}
    for file in folder.glob("*"):
        try:
            stamps[file.name] = file.stat().st_mtime_ns
        except FileNotFoundError:
            continue
    return stamps
