"""Every family of the support table on an imagined GPU, on the kernels that take fp32."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.imagined.support import environment, needs_imagination
from tests.models.families import FAMILIES

pytestmark = [pytest.mark.imagined, needs_imagination]
NAMES = list(FAMILIES)


# A capability for each part of the table: they differ in the kernels that are preferred, not in families.
@pytest.mark.parametrize(("part", "capability"), [*enumerate(["7.5", "8.0", "9.0", "10.0"])])
def test_families_equal_stock_eager_attention(part: int, capability: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.imagined.families", capability, *NAMES[part::4]],
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
        cwd=tmp_path,
        env=environment(),
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.stdout.count(": equal") == len(NAMES[part::4])
