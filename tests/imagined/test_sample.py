"""A first step on an imagined GPU, in a process of its own: a sharp sample of ``make test-imagined``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.imagined.support import needs_imagination
from tests.scripts import run_python

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "64-true")


def _sample(what: str, capability: str, folder: Path) -> None:
    run_python("-m", "tests.imagined.sample", what, capability, cwd=folder, timeout_s=900)


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
