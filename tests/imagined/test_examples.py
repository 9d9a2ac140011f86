"""README, quickstart and every example run as they stand on an imagined GPU, and wait for nothing of ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.imagined.support import ROOT, needs_imagination, our_reads, run
from tests.test_examples import ARGUMENTS

pytestmark = [pytest.mark.imagined, needs_imagination]
STEPS = 5
# fp8.py rounds to FP8 on a CPU. ray_train.py trains in processes of Ray, which have no imagined device.
NOT_ONE_GPU = {"fp8.py", "ray_train.py"}
# Uploads beside the batch's: of transformers' vision tower, and of prompts and ranks' decisions by Lightning.
MORE_UPLOADS = {
    *("vision_language.py", "vision_chat.py", "one_step_by_hand.py", "rl_logprobs.py", "grpo.py"),
    "slurm_streams.py",
}
# Functions of ours that read: tokens sampled on the GPU, to pack them; the largest image of a vision tower,
# below which transformers reads too; the mode that counts a step's products, through which GradScaler reads.
READS = {
    "grpo.py": ("padded_on_host",),
    "vision_language.py": ("_run_tower",),
    "own_module.py": ("__torch_function__",),
}
# A checkpoint copies all weights and states to the host.
WITHOUT_CHECKPOINTS = {"slurm_streams.py": ["--every", "100"]}
# A script of one step has no step after the first ones, whose reads are not counted.
WITHOUT_STEPS = {"rl_logprobs.py", "one_step_by_hand.py"}


@pytest.mark.parametrize("capability", ["9.0", "8.0", "7.5"])
@pytest.mark.parametrize("name", sorted({*ARGUMENTS} - NOT_ONE_GPU))
def test_example(name: str, capability: str, tmp_path: Path) -> None:
    text = (ROOT / "examples" / name).read_text()
    arguments = ["--steps", str(STEPS)] if "--steps" in text else []
    arguments += ["--out", str(tmp_path)] if '"--out"' in text else []
    arguments += ["--scratch", str(tmp_path)] if '"--scratch"' in text else []
    arguments += WITHOUT_CHECKPOINTS.get(name, [])
    report = run(ROOT / "examples" / name, *arguments, out=tmp_path, capability=capability)
    allowed = READS.get(name, ())
    ours = {row: n for row, n in our_reads(report).items() if row.split(" > ")[0].split()[-1] not in allowed}

    assert not ours, report["reads"]
    if name in WITHOUT_STEPS:
        return
    # GradScaler leaves out the first steps of fp16, whose scaled gradients overflow.
    assert STEPS - 2 * (capability == "7.5") <= report["steps"] <= STEPS

    uploads = report["uploads"]
    batches = {row: n for row, n in uploads.items() if "batch/upload" in row}
    assert batches
    assert all("pinned non_blocking" in row for row in batches), uploads
    assert name in MORE_UPLOADS or uploads == batches, uploads


@pytest.mark.parametrize("capability", ["9.0", "8.0", "7.5"])
def test_readme(capability: str, tmp_path: Path) -> None:
    (block, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    script = tmp_path / "readme.py"
    script.write_text(block.replace("max_steps=100", f"max_steps={STEPS}").replace("8_192", "1_024"))
    report = run(script, out=tmp_path, capability=capability)
    assert report["steps"] == STEPS
    assert not our_reads(report), report["reads"]
    assert all("batch/upload" in row and "pinned non_blocking" in row for row in report["uploads"])
    half = "16-mixed" if capability == "7.5" else "bf16-mixed"
    assert f"precision='{half}'" in report["printed"]  # fp32 stays, and the faster precision is named
