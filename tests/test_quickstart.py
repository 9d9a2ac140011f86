"""The quickstart as a user runs it: files in, event files, table, picture and checkpoints out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lightning_thd.data import stdlib_documents
from lightning_thd.packing import PackPlanner, Packs
from tests.scripts import EXAMPLES, finished, run_python, smaller_examples
from tests.trackers import read_tensorboard


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
    assert re.search(r"^3\.3M parameters, (cpu|cuda:0), \S+, 10 steps$", shown, re.M)
    assert "MFU" in shown
    assert "HFU" not in shown  # nothing is recomputed
    assert shown.splitlines()[-1].startswith(f"Done. Next: open {tmp_path}/report.html")
    assert (tmp_path / "report.png").stat().st_size > 5_000


def test_packs_of_the_real_quickstart_are_full() -> None:
    lengths = [len(text.encode()) + 1 for text in stdlib_documents(max_bytes=2048)]
    planner = PackPlanner(lengths, 8192, global_batch=Packs(1), oversize="split")
    tokens = [int(planner.step(0, k, 1).spans.lengths.sum()) for k in range(100)]
    assert sum(tokens) >= 0.97 * 8192 * len(tokens), min(tokens)


def test_resuming_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    done = finished(EXAMPLES / "quickstart.py", "--out", tmp_path, "--resume")
    assert done.returncode == 2
    assert f"--resume: {tmp_path}/checkpoints holds no last.ckpt" in done.stderr


@pytest.mark.slow
def test_own_texts_in_two_runs(smaller: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    out = tmp_path / "run"
    file.write_text("".join(json.dumps({"body": text}) + "\n" for text in stdlib_documents()[:400]))
    options = [smaller, "--out", out, "--data", file, "--text-key", "body"]
    run_python(*options, "--steps", "20", timeout_s=560)
    run_python(*options, "--steps", "40", "--resume", timeout_s=560)
    losses = read_tensorboard(out / "tensorboard")["train/loss"]
    assert losses[-1][0] == 39
    assert losses[-1][1] < losses[0][1]
