"""Layouts of ranks on imagined GPUs give one process's parameters, and wait for nothing of ours."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.imagined.support import environment, needs_imagination, our_reads

pytestmark = [pytest.mark.imagined, needs_imagination]
# Reads a step by our code: the last stage of a pipeline reads its losses and logged values once.
READS = {"pp": 1.0, "pp x dp": 1.0}
TWO = ("ddp", "fsdp", "tp", "pp", "cp needed", "cp all_gather", "cp ulysses", "cp ring")
FOUR = ("cp x tp", "dp x cp", "pp x dp", "replicas")


@pytest.mark.parametrize(("world", "names"), [(2, TWO), (4, FOUR)])
def test_layouts_on_an_imagined_nccl(world: int, names: tuple[str, ...], tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = tmp_path / "found.json"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.imagined.layouts", str(out), *names],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env={
                **environment(),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "GROUP_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": "imagined",
            },
        )
        for rank in range(world)
    ]
    try:
        said = [rank.communicate(timeout=1800)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    found = json.loads(out.read_text()) if out.exists() else {}
    assert all(rank.returncode == 0 for rank in ranks), (list(found), *(text[-3000:] for text in said))
    for name in names:
        seen = found[name]
        assert seen["error"] < 1e-5, (name, seen["error"])
        assert seen["losses"] < 1e-5, (name, seen["losses"])
        assert sum(our_reads(seen).values()) <= READS.get(name, 0.0), (name, our_reads(seen))
        ours = {row: n for row, n in seen["uploads"].items() if "batch/upload" in row}
        assert ours, (name, seen["uploads"])
        assert all("pinned non_blocking" in row for row in ours), (name, ours)
