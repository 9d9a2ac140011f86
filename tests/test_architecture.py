"""Every path that ARCHITECTURE.md and CONTRIBUTING.md name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_paths_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    paths = set(re.findall(r"`((?:lightning_thd|tests|benchmarks|examples|docs)/[\w./-]*)`", text))
    assert paths
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_the_drawing_names_folders_that_exist() -> None:
    drawing = (ROOT / "ARCHITECTURE.md").read_text().split("```")[1]
    folders = set(re.findall(r"\b([a-z_]+(?:/[a-z_]+)*)/(?=\s|,|$)", drawing)) - {"lightning_thd"}
    assert {"data/read", "packing", "batch", "strategies", "models", "loss"} <= folders
    assert [f for f in sorted(folders) if not (ROOT / "lightning_thd" / f).is_dir()] == []
