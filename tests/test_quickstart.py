"""The quickstart as a user runs it: files in, event files, table, picture and checkpoints out."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_thd.data import stdlib_documents
from lightning_thd.packing import PackPlanner, Packs
from tests.scripts import EXAMPLES, finished, run_python, smaller_examples
from tests.trackers import read_tensorboard


def quickstart(out: Path, *arguments: str) -> str:
    return run_python(EXAMPLES / "quickstart.py", "--out", out, *arguments, timeout_s=560)


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smaller_examples(tmp_path_factory.mktemp("examples")) / "quickstart.py"


def test_ten_steps_leave_what_the_readme_says(smaller: Path, tmp_path: Path) -> None:
    shown = run_python(smaller, "--out", tmp_path, "--steps", "10")
    series = read_tensorboard(tmp_path / "tensorboard")
    losses = [value for _, value in series["train/loss"]]
    assert losses[0] > losses[-1] > 0
    assert all(0 < value <= 1.2 for _, value in series["train/device/mfu"])
    assert all(value > 0 for _, value in series["train/device/tflops_per_gpu"])
    assert all(value > 0 for _, value in series["train/device/real_items_per_sec"])
    # The packs of the smaller copy hold a few whole documents of at most 256 bytes; those of 8,192 are full.
    assert all(0.5 < value <= 1 for _, value in series["train/packing/fill"])
    assert "TFLOP/s/device" in shown
    assert re.search(r"^3\.3M parameters, cpu, \S+, 10 steps$", shown, re.M)
    assert "MFU" in shown
    assert "HFU" not in shown  # nothing is recomputed
    assert shown.splitlines()[-1].startswith(f"Done. Next: open {tmp_path}/report.html")
    assert (tmp_path / "report.png").stat().st_size > 5_000


def test_packs_of_the_real_quickstart_are_full() -> None:
    lengths = [len(text.encode()) + 1 for text in stdlib_documents(max_bytes=2048)]
    planner = PackPlanner(lengths, 8192, global_batch=Packs(1), oversize="split")
    tokens = [int(planner.step(0, k, 1).spans.lengths.sum()) for k in range(100)]
    assert sum(tokens) >= 0.97 * 8192 * len(tokens), min(tokens)


LEDGER = """
import sys
sys.path.insert(0, {examples!r})
import quickstart
step = quickstart.TinyQwen3.training_step
def training_step(self, batch, batch_idx):
    with open({ledger!r}, "a") as file:
        file.write(" ".join(map(str, [self.global_step, *batch.sequence_ids])) + chr(10))
    return step(self, batch, batch_idx)
quickstart.TinyQwen3.training_step = training_step
sys.argv[1:] = {arguments!r}
quickstart.main()
"""


@pytest.mark.slow
def test_sigkill_and_resume_use_every_document_of_the_epoch_once(tmp_path: Path) -> None:
    documents = stdlib_documents(max_bytes=2048)[:900]
    file, out = tmp_path / "d.jsonl", tmp_path / "run"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    lengths = [len(text.encode()) + 1 for text in documents]
    steps = len(PackPlanner(lengths, 8192, global_batch=Packs(1), oversize="split"))
    assert steps > 30
    rng = random.Random(4)
    ledgers = []
    for kill_after in (rng.randint(21, 28), None):
        ledgers.append(tmp_path / f"ledger-{len(ledgers)}")
        arguments = ["--data", str(file), "--steps", str(steps), "--out", str(out)]
        arguments += [] if kill_after else ["--resume"]
        code = LEDGER.format(examples=str(EXAMPLES), ledger=str(ledgers[-1]), arguments=arguments)
        job = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while kill_after and job.poll() is None and len(rows(ledgers[-1])) < kill_after:
            time.sleep(0.05)
        if kill_after:
            job.kill()
        assert job.wait(600) == (-signal.SIGKILL if kill_after else 0)
    first, second = rows(ledgers[0]), rows(ledgers[1])
    assert second[0][0] == 20  # the last checkpoint
    used = [i for step, *ids in first if step < second[0][0] for i in ids] + [
        i for _, *ids in second for i in ids
    ]
    assert sorted(used) == list(range(len(documents)))


def rows(file: Path) -> list[list[int]]:
    return [list(map(int, line.split())) for line in file.read_text().splitlines()] if file.exists() else []


def test_resuming_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    done = finished(EXAMPLES / "quickstart.py", "--out", tmp_path, "--resume")
    assert done.returncode == 2
    assert f"--resume: {tmp_path}/checkpoints holds no last.ckpt" in done.stderr


@pytest.mark.slow
def test_a_hundred_steps_halve_the_loss(tmp_path: Path) -> None:
    quickstart(tmp_path, "--steps", "100")
    losses = [value for _, value in read_tensorboard(tmp_path / "tensorboard")["train/loss"]]
    assert losses[-1] < losses[0] / 2


@pytest.mark.slow  # tests/data reads such files
def test_own_jsonl(smaller: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({"body": text}) + "\n" for text in stdlib_documents()[:400]))
    run_python(smaller, "--out", tmp_path / "run", "--steps", 1, "--data", file, "--text-key", "body")
    assert (tmp_path / "run" / "csv").is_dir()
