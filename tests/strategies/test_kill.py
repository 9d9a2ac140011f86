"""One rank of four is killed in the middle of a step: the job ends with an error in time, and resumes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_thd import Sequences
from lightning_thd.packing import PackPlanner
from tests.ranks import environment_of, run_ranks
from tests.strategies import kill_job
from tests.strategies.jobs import CAPACITY, Layout, train
from tests.tiny import largest_error, sequences


def start(out: Path, dp: int, cp: int, *options: str, **environment: str) -> subprocess.Popen[bytes]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={dp * cp}", *options]
    command = [sys.executable, *launcher, "-m", "tests.strategies.kill_job", str(out), str(dp), str(cp)]
    with (out / "log.txt").open("ab") as log:
        return subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
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
@pytest.mark.parametrize(
    ("first", "then"), [((2, 2, ""), (4, 1, "")), ((4, 1, "4"), (2, 1, "2"))], ids=["fixed", "dynamic"]
)
def test_one_rank_dies_and_the_job_goes_on(
    tmp_path: Path, first: tuple[int, int, str], then: tuple[int, int, str]
) -> None:
    job = start(tmp_path, *first[:2], MOST_RANKS=first[2] or "0")
    os.kill(wait_for_step(tmp_path / "ledger-1.txt", 5, job), signal.SIGKILL)
    killed = time.monotonic()
    assert job.wait(120) != 0
    assert time.monotonic() - killed < 60  # the timeout of 20 s, and torchrun's own 30 s to stop the others
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()
    resumed = start(tmp_path, *then[:2], MOST_RANKS=then[2] or "0")
    assert resumed.wait(240) == 0, (tmp_path / "log.txt").read_text()[-4000:]
    # Every sequence of the plan once along the surviving line, or the parameters would differ.
    assert largest_error(torch.load(tmp_path / "final.pt"), run_ranks(alone, 1)[0]) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_that_sigterm_stops_does_not_say_that_it_is_done(tmp_path: Path, ranks: int) -> None:
    job = start(tmp_path, ranks, 1)
    os.kill(wait_for_step(tmp_path / "ledger-0.txt", 5, job), signal.SIGTERM)
    assert job.wait(120) != 0
    assert not (tmp_path / "final.pt").exists()
    assert start(tmp_path, ranks, 1).wait(240) == 0, (tmp_path / "log.txt").read_text()[-4000:]
    assert largest_error(torch.load(tmp_path / "final.pt"), run_ranks(alone, 1)[0]) < 1e-10


@pytest.mark.slow
def test_a_job_of_shared_prefixes_dies_and_goes_on_with_the_same_sequences(tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    whole = tmp_path / "whole"
    for folder in (killed, whole):
        folder.mkdir()
    job = start(killed, 2, 1, SHARE_PREFIXES="1")
    os.kill(wait_for_step(killed / "ledger-1.txt", 5, job), signal.SIGKILL)

    assert job.wait(120) != 0
    assert (killed / "checkpoints" / "last.ckpt").exists()

    for folder in (killed, whole):
        done = start(folder, 1, 1, SHARE_PREFIXES="1").wait(240)
        assert done == 0, (folder / "log.txt").read_text()[-4000:]

    assert largest_error(torch.load(killed / "final.pt"), torch.load(whole / "final.pt")) < 1e-10
    begun, resumed = sequences_of(killed / "ledger-0.txt")
    (expected,) = sequences_of(whole / "ledger-0.txt")

    assert len(begun) > 4
    assert resumed == {step: ids for step, ids in expected.items() if step >= min(resumed)}


@pytest.mark.slow
def test_torchrun_starts_a_job_again_and_it_goes_on_with_the_same_sequences(tmp_path: Path) -> None:
    job = start(tmp_path, 2, 1, "--max-restarts=1", KILL_AT="1:7")
    assert job.wait(280) == 0, (tmp_path / "log.txt").read_text()[-4000:]

    starts = [sequences_of(tmp_path / f"ledger-{rank}.txt") for rank in range(2)]
    assert all(len(of_rank) == 2 for of_rank in starts)  # killed once, started twice

    again = [min(of_rank[1]) for of_rank in starts]
    assert again[0] == again[1]
    assert again[0] in (4, 6)  # checkpoints at 2, 4, 6; the last may not have been whole

    for before, after in starts:
        assert sorted(after) == list(range(again[0], kill_job.STEPS))
        shared = sorted(before.keys() & after.keys())[:-1]  # in the last one before the kill it was cut off
        assert [before[step] for step in shared] == [after[step] for step in shared]

    for step, ids in enumerate(planned_sequences()):
        last = [after if step in after else before for before, after in starts]
        assert sorted(i for of_rank in last for i in of_rank[step]) == ids, step

    trained = torch.load(tmp_path / "final.pt")
    assert largest_error(trained, run_ranks(alone, 1)[0]) < 1e-10


def planned_sequences() -> list[list[int]]:
    """Return the sequences of every step, from the plan alone."""
    lengths = [len(sample["input_ids"]) for sample in sequences(80, labels=True)]
    planner = PackPlanner(lengths, CAPACITY, global_batch=Sequences(12))
    steps = [planner.step(*divmod(k, len(planner)), 1).indices_by_rank() for k in range(kill_job.STEPS)]
    return [sorted(int(i) for rank in step for pack in rank for i in pack) for step in steps]


def sequences_of(ledger: Path) -> list[dict[int, list[int]]]:
    """Return, for every start of a rank, the sequences of its steps."""
    processes: dict[str, dict[int, list[int]]] = {}
    for line in ledger.read_text().splitlines():
        process, step, ids = line.split(" ")
        processes.setdefault(process, {}).setdefault(int(step), []).extend(
            map(int, filter(None, ids.split(",")))
        )
    return [{step: sorted(ids) for step, ids in steps.items()} for steps in processes.values()]


def alone(family: str = "qwen3") -> dict[str, torch.Tensor]:
    result = train(family, Layout(), Sequences(12), torch.float64, {"max_steps": kill_job.STEPS})
    params: dict[str, torch.Tensor] = result["params"]
    return params


def start_ranks(out: Path, layout: Layout) -> list[subprocess.Popen[bytes]]:
    """Start every rank alone: no launcher ends the others when one dies."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["-m", "tests.strategies.kill_job", str(out), *map(str, (layout.dp, layout.cp, layout.pp))]
    processes = []
    for rank in range(layout.world):
        names = {**environment_of(rank, layout.world), "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        with (out / f"log-{rank}.txt").open("ab") as log:
            environment = {**os.environ, **names}
            started = subprocess.Popen([sys.executable, *command], env=environment, stdout=log, stderr=log)
            processes.append(started)
    return processes


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(pp=4), Layout(pp=2, dp=2)], ids=["pp4", "pp2dp2"])
def test_a_stage_dies_and_every_rank_ends_with_an_error(
    tmp_path: Path, layout: Layout, record_property: Callable[[str, object], None]
) -> None:
    ranks = start_ranks(tmp_path, layout)
    try:
        os.kill(wait_for_step(tmp_path / "ledger-1.txt", 5, ranks[1]), signal.SIGKILL)
        killed = time.monotonic()
        codes = [rank.wait(60) for rank in ranks]
        took = time.monotonic() - killed
    finally:
        for rank in ranks:
            rank.kill()

    record_property("seconds from the kill to the last error", round(took, 1))
    assert codes[1] == -signal.SIGKILL
    for rank in (0, 2, 3):
        assert codes[rank] != 0
        assert "Error" in (tmp_path / f"log-{rank}.txt").read_text()
    assert [rank.wait(240) for rank in start_ranks(tmp_path, layout)] == [0] * layout.world

    expected = run_ranks(alone, 1, kill_job.FAMILY)[0]
    for rank in range(layout.world):
        params = torch.load(tmp_path / f"final-{rank}.pt")
        of_stage = {n if n in expected else "model.embed_tokens.weight": value for n, value in params.items()}
        assert largest_error(of_stage, {name: expected[name] for name in of_stage}) < 1e-10
