"""examples/slurm_streams.py goes on after a kill in any layout; its sbatch file queues the job again."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lightning_thd.data import stdlib_documents

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LINE = re.compile(r"^step (\d+): loss (\d\.\d{5})$", re.M)
STEPS = 12

# SLURM's part: one task on each of two nodes, whose local folders differ; a task that fails ends the others.
SRUN = r"""#!/bin/bash
shift  # --kill-on-bad-exit=1
for node in 0 1; do
    SLURM_PROCID=$node SLURM_NODEID=$node SLURM_LOCALID=0 "${@/$LOCAL/$LOCAL/node-$node}" &
    echo $! >> "$OUT/tasks"
done
wait -n && wait -n && exit 0
kill -KILL $(jobs -p)
exit 1
"""
SCONTROL = """#!/bin/bash
echo "$@" >> "$OUT/queue"
kill -KILL $(cat "$OUT/tasks")
"""


def losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in LINE.findall(text)}


def check(found: dict[int, float], wanted: dict[int, float]) -> None:
    """Compare losses of fp32, printed to six digits, of which the last may be rounded the other way."""
    assert found == pytest.approx({step: wanted[step] for step in found}, abs=2.1e-5)


def start(out: Path, *options: str, ranks: int = 1) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] * (ranks > 1)
    folders = ["--out", str(out), "--scratch", str(out / "local")]
    return subprocess.Popen(
        [sys.executable, *launcher, str(EXAMPLES / "slurm_streams.py"), *folders, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def read_until(job: subprocess.Popen[str], step: int) -> str:
    """Return what a job prints up to a step's loss."""
    assert job.stdout is not None
    seen = ""
    for line in job.stdout:
        seen += line
        if step in losses(line):
            return seen
    raise AssertionError(seen)


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def finished(job: subprocess.Popen[str]) -> dict[int, float]:
    """Return the losses of a job that ends by itself."""
    text, _ = job.communicate(timeout=240)
    assert job.returncode == 0, text[-4000:]
    return losses(text)


@pytest.mark.slow
def test_a_killed_job_goes_on_in_every_layout_with_the_same_losses(tmp_path: Path) -> None:
    expected = finished(start(tmp_path / "whole"))
    assert sorted(expected) == list(range(1, STEPS + 1))

    out = tmp_path / "killed"
    job = start(out, "--cp", "2", ranks=2)
    begun = losses(read_until(job, 6))
    os.kill(children(job.pid)[-1], signal.SIGKILL)
    job.communicate(timeout=120)
    assert job.returncode != 0
    assert sorted(begun) == [1, 2, 3, 4, 5, 6]
    check(begun, expected)

    for options, ranks, last in ((("--tp", "2"), 2, 8), ((), 1, 10), ((), 2, 12)):
        resumed = finished(start(out, *options, "--steps", str(last), ranks=ranks))
        assert last in resumed
        check(resumed, expected)


class Cluster:
    """Two nodes that are folders: the sbatch file runs here, with stand-ins for srun and scontrol."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self.jobs: list[subprocess.Popen[str]] = []
        programs = folder / "bin"
        programs.mkdir()
        python = f'#!/bin/bash\nexec {sys.executable} "$@"\n'

        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", python)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]

        self.environment = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "OUT": str(self.out),
            "LOCAL": str(folder / "local"),
            "SLURM_JOB_ID": "12345",
            "SLURM_JOB_NAME": "streams",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_NNODES": "2",
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "1",
            "SLURM_NODELIST": "localhost",
            "SLURM_SUBMIT_DIR": str(folder),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }

    def start(self, *options: str) -> subprocess.Popen[str]:
        (self.out / "tasks").unlink(missing_ok=True)
        job = subprocess.Popen(
            ["bash", str(EXAMPLES / "slurm_streams.sbatch"), *options],
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.jobs.append(job)
        return job

    def stop(self) -> None:
        """End what is left of the jobs."""
        for job in self.jobs:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.communicate()

    def queue(self) -> list[str]:
        """Return what scontrol was asked for."""
        requests = self.out / "queue"
        return requests.read_text().splitlines() if requests.exists() else []


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.stop()


@pytest.mark.slow
def test_the_sbatch_file_puts_the_job_into_the_queue_and_the_job_goes_on(
    cluster: Cluster, tmp_path: Path
) -> None:
    texts = stdlib_documents(max_bytes=300)[:400]
    for number in range(4):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[number::4]]
        (tmp_path / f"shard-{number}.jsonl").write_text("".join(lines))
    data = ["--data", f"{tmp_path}/shard-*.jsonl", "--steps", "6"]
    expected = finished(start(tmp_path / "whole", *data))

    job = cluster.start("--cp", "2", *data)
    begun = losses(read_until(job, 3))
    job.send_signal(signal.SIGUSR1)  # as SLURM does before the time is over
    job.communicate(timeout=60)
    assert (job.returncode, cluster.queue()) == (0, ["requeue 12345"])

    job = cluster.start("--cp", "2", *data)
    begun |= losses(read_until(job, 4))
    os.kill(int((cluster.out / "tasks").read_text().split()[1]), signal.SIGKILL)  # as on a lost node
    job.communicate(timeout=60)
    assert job.returncode != 0
    assert cluster.queue() == ["requeue 12345"] * 2

    job = cluster.start("--cp", "2", *data)
    text, _ = job.communicate(timeout=240)
    assert job.returncode == 0, text[-4000:]
    assert cluster.queue() == ["requeue 12345"] * 2  # a job that has ended is not started again
    begun |= losses(text)
    assert sorted(begun) == list(range(1, 7))
    check(begun, expected)
