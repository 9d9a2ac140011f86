from __future__ import annotations

import json
import re

import pytest

from lightning_thd.cli.main import main
from lightning_thd.flops.peak_table import PEAKS


def test_the_table_has_a_line_a_device_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    main(["peaks"])
    lines = capsys.readouterr().out.splitlines()
    numbered = [line for line in lines if re.search(r" \[\d+\]$", line)]
    assert len(numbered) == len(PEAKS)
    (h100,) = [line for line in lines if line.startswith("h100 pcie ")]
    *figures, number = h100.split()[2:]
    assert figures == ["756", "756", "378", "51.2", "1513", "-", "sparse"]
    assert f"{number} NVIDIA H100 Tensor Core GPU datasheet" in lines


def test_json_and_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    main(["peaks", "NVIDIA H100 80GB HBM3", "--json"])
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["bf16"], row["printed"]) == ("h100", 989.4, "sparse")
