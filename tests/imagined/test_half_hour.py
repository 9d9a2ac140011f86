"""The commands of the first half hour on a GPU, each in small on an imagined one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.imagined.support import needs_imagination
from tests.scripts import run_python

PARTS = (
    *("loss_kernels", "loss_big_head", "train_125m", "train_7b", "host_time", "lightning_1b"),
    *("attention", "attention_speed", "cuda_graph", "profile", "nccl", "command"),
)


@needs_imagination
@pytest.mark.imagined
@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs_to_its_end(part: str, tmp_path: Path) -> None:
    run_python("-m", "tests.imagined.half_hour", part, cwd=tmp_path, timeout_s=1800)
