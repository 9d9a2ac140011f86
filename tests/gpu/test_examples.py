"""README, quickstart and every example run as they stand on a CUDA device; our code never waits for it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.device_reads import ON_GPU
from tests.scripts import EXAMPLES
from tests.test_examples import ARGUMENTS

pytestmark = ON_GPU
STEPS = 6
# fp8.py rounds to FP8 on a CPU by default. ray_train.py trains in processes of Ray.
NOT_ONE_GPU = {"fp8.py", "ray_train.py"}
# Functions of ours that wait: tokens sampled on the GPU, to pack them, and a vision tower of transformers.
WAITS = {"grpo.py": ("padded_on_host",), "vision_language.py": ("forward_of_tower",)}
# GradScaler, transformers' Trainer, vision towers, experts; a peak and a model's FLOPs, found once.
LIBRARIES = ("optimizer_step", "hf_data.py", "announce.py", "experts_forward", "peaks.py", "torch_counter.py")


def run(script: Path, *arguments: str, out: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.gpu.run", "--json", str(out / "waits.json"), str(script)]
    environment = {**os.environ, "PYTHONPATH": f"{EXAMPLES.parent}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [*command, *arguments],
        cwd=out,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return {**json.loads((out / "waits.json").read_text()), "printed": done.stdout + done.stderr}


def ours(found: dict[str, Any], *allowed: str) -> dict[str, float]:
    rows = {row: n for row, n in found["waits"].items() if row.startswith("ours")}
    # The progress bar shows the loss of the step that is logged, one in five.
    rows = {row: n for row, n in rows.items() if n > 1 / 4 or "on_train_batch_end" not in row}
    return {row: n for row, n in rows.items() if not any(word in row for word in (*LIBRARIES, *allowed))}


@pytest.mark.parametrize("name", sorted({*ARGUMENTS} - NOT_ONE_GPU))
def test_example(name: str, tmp_path: Path) -> None:
    text = (EXAMPLES / name).read_text()
    arguments = ["--steps", str(STEPS)] if "--steps" in text else []
    arguments += ["--out", str(tmp_path)] if '"--out"' in text else []
    report = run(EXAMPLES / name, *arguments, out=tmp_path)
    assert not ours(report, *WAITS.get(name, ())), report["waits"]


@pytest.mark.parametrize("precision", [None, "32-true", "16-mixed", "bf16-true", "64-true"])
def test_readme(precision: str | None, tmp_path: Path) -> None:
    (block, *_) = re.findall(r"```python\n(.*?)```", (EXAMPLES.parent / "README.md").read_text(), re.S)
    text = block.replace("max_steps=100", f"max_steps={STEPS}").replace("8_192", "1_024")
    if precision:
        text = text.replace("L.Trainer(", f"L.Trainer(precision={precision!r}, ")
    (tmp_path / "readme.py").write_text(text)
    report = run(tmp_path / "readme.py", out=tmp_path)
    assert report["steps"] >= STEPS - 2 * (precision == "16-mixed")  # GradScaler leaves out steps
    assert not ours(report), report["waits"]
    assert precision or "precision='bf16-mixed'" in report["printed"]
