"""Ray Train runs packed steps: a worker's death and a run on fewer workers use every sequence once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Writes the sequences of every step that a worker begins, and kills the last worker once, in step 4.
DRIVER = """
import json, os, signal, sys, time
import ray_train
from pathlib import Path

out = Path(sys.argv.pop(1))
original, began = ray_train.train_on_a_worker, time.time()

def loop(given):
    began = time.time()
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        ids = [i for one in batch.microbatches for i in one.sequence_ids]
        row = [began, trainer.world_size, trainer.global_rank, trainer.global_step, ids]
        with (out / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(row) + chr(10))
        if (trainer.global_step, trainer.global_rank) == (4, 1) and not (out / "died").exists():
            (out / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    ray_train.ReportEvery.on_train_batch_start = on_train_batch_start
    original(given)

ray_train.train_on_a_worker = loop
ray_train.main()
"""


def run(folder: Path, *arguments: str) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(folder), "--out", str(folder / "ray"), *arguments],
        env={**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert "Done: step" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_a_death_and_fewer_workers_use_every_sequence_once(tmp_path: Path) -> None:
    run(tmp_path, "--workers", "2", "--steps", "6")
    assert (tmp_path / "died").exists()
    run(tmp_path, "--workers", "1", "--steps", "10")
    rows = [json.loads(line) for file in tmp_path.glob("*.jsonl") for line in file.read_text().splitlines()]
    steps: dict[int, list[int]] = {}
    for step in range(10):
        # The last attempt at a step counts; the workers of an attempt begin within seconds.
        attempts = sorted((row for row in rows if row[3] == step), key=lambda row: row[0])
        world = attempts[-1][1]
        steps[step] = [i for row in attempts[-world:] for i in row[4]]
    assert [len(ids) for ids in steps.values()] == [16] * 10
    assert len({i for ids in steps.values() for i in ids}) == 160
    assert {row[1] for row in rows} == {1, 2}
