"""Every family of the support table and every loss on an imagined GPU, on the kernels that take fp32."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.imagined.support import needs_imagination
from tests.models.families import FAMILIES
from tests.scripts import finished

pytestmark = [pytest.mark.imagined, needs_imagination]
NAMES = list(FAMILIES)


# A capability for each part of the table: they differ in the kernels that are preferred, not in families.
@pytest.mark.parametrize(("part", "capability"), [*enumerate(["7.5", "8.0", "9.0", "10.0"])])
def test_families_equal_stock_eager_attention(part: int, capability: str, tmp_path: Path) -> None:
    module = ("-m", "tests.imagined.families", capability)
    done = finished(*module, *NAMES[part::4], cwd=tmp_path, timeout_s=1800)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.stdout.count(": equal") == len(NAMES[part::4])


@pytest.mark.parametrize("capability", ["9.0", "7.5"])
def test_losses_equal_the_cpu_and_read_nothing(capability: str, tmp_path: Path) -> None:
    done = finished("-m", "tests.imagined.losses", capability, cwd=tmp_path, timeout_s=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.stdout.count(": equal") > 50
