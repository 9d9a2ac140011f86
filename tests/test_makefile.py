"""``make`` alone and ``make help`` list every target with what it does."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("arguments", [[], ["help"]])
def test_make_lists_the_targets(arguments: list[str]) -> None:
    done = subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.M)
    listed = re.findall(r"^  make ([a-z-]+) +\S", done.stdout, re.M)
    assert sorted(listed) == sorted(phony.split())
    assert "test" in listed
