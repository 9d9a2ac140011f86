"""The page of a run: numbers that matter on top, as a picture and as a file that needs no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_thd.report import page, picture
from lightning_thd.report.look import LOOKS, Theme

SERIES = {
    "train/loss": [(0, 5.5), (1, 3.0), (2, float("nan")), (3, 2.25)],
    "train/device/mfu": [(1, 0.5), (2, 0.25), (3, 0.75)],
    "train/packing/fill": [(0, 1.0)],
}


@pytest.mark.parametrize("theme", LOOKS)
def test_the_html_needs_no_other_file_and_says_the_numbers(theme: Theme, tmp_path: Path) -> None:
    text = page(SERIES, tmp_path / "report.html", theme=theme).read_text()
    assert "<b>2.25</b><span>loss</span>" in text
    assert "<b>50%</b><span>MFU</span>" in text  # the median
    assert not re.findall(r'(?:src|href)="(?!data:)', text)
    assert LOOKS[theme].paper in text
    assert "lightning_thd" in text
    assert "nan" not in re.sub(r"base64,[^\"]*", "", text)


@pytest.mark.parametrize("theme", LOOKS)
def test_the_picture_is_drawn(theme: Theme, tmp_path: Path) -> None:
    assert picture(SERIES, tmp_path / "report.png", theme=theme).read_bytes().startswith(b"\x89PNG")


def test_a_run_that_logged_nothing_known(tmp_path: Path) -> None:
    assert picture({"other": [(0, 1.0)]}, tmp_path / "report.png").stat().st_size > 0
