"""A stage of a pipeline is killed inside a step: every rank ends with an error, and the job resumes."""

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
from tests.ranks import run_ranks
from tests.strategies import kill_job
from tests.strategies.jobs import Layout, train
from tests.strategies.test_kill import wait_for_step
from tests.tiny import largest_error


def start_ranks(out: Path, layout: Layout) -> list[subprocess.Popen[bytes]]:
    """Start every rank alone: no launcher ends the others when one dies."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["-m", "tests.strategies.kill_job", str(out), *map(str, (layout.dp, layout.cp, layout.pp))]
    found = []
    for rank in range(layout.world):
        names = {
            "OMP_NUM_THREADS": 1,
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": layout.world,
            "LOCAL_WORLD_SIZE": layout.world,
            "GROUP_RANK": 0,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": "kill",
        }
        with (out / f"log-{rank}.txt").open("ab") as log:
            found.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    env={**os.environ, **{name: str(value) for name, value in names.items()}},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    return found


def alone() -> dict[str, torch.Tensor]:
    options = {"max_steps": kill_job.STEPS}
    run = train(kill_job.FAMILY, Layout(), Sequences(12), torch.float64, options)
    params: dict[str, torch.Tensor] = run["params"]
    return params


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
    wanted = run_ranks(alone, 1)[0]
    for rank in range(layout.world):
        found = torch.load(tmp_path / f"final-{rank}.pt")
        own = {n if n in wanted else "model.embed_tokens.weight": value for n, value in found.items()}
        assert largest_error(own, {name: wanted[name] for name in own}) < 1e-10
