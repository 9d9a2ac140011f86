"""A first step on an imagined GPU, in a process of its own: a sharp sample of ``make test-imagined``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.imagined.support import environment, needs_imagination

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "64-true")


def _sample(what: str, capability: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.imagined.sample", what, capability],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        cwd=folder,
        env=environment(),
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@needs_imagination
def test_a_batch_takes_one_upload_and_a_step_reads_nothing(tmp_path: Path) -> None:
    _sample("sample", "9.0", tmp_path)


@needs_imagination
@pytest.mark.imagined
@pytest.mark.parametrize("capability", ["9.0", "7.5"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_losses_of_every_precision_are_those_of_the_cpu(
    precision: str, capability: str, tmp_path: Path
) -> None:
    if capability == "7.5" and precision.startswith("bf16"):
        pytest.skip("a GPU of capability 7.5 has no bf16")
    _sample(precision, capability, tmp_path)
