"""The page of a run: numbers that matter on top, as a picture and as a file that needs no other."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from lightning_thd.report import page, picture, table
from lightning_thd.report.look import LOOKS, Theme, new_figure
from lightning_thd.report.page import PARTS, draw_page, draw_waterfall, step_times

SERIES = {
    "train/loss": [(0, 5.5), (1, 3.0), (2, float("nan")), (3, 2.25)],
    "train/device/mfu": [(1, 0.5), (2, 0.25), (3, 0.75)],
    "train/packing/fill": [(0, 1.0)],
}


@pytest.mark.parametrize("theme", LOOKS)
def test_the_html_needs_no_other_file_and_says_the_numbers(theme: Theme, tmp_path: Path) -> None:
    text = page(SERIES, tmp_path / "report.html", theme=theme).read_text()
    assert "<b>2.25</b><span>loss</span>, last" in text
    assert "<b>50%</b><span>MFU</span>, median" in text
    assert time.strftime("%Y-%m-%d") in text
    assert not re.findall(r'(?:src|href)="(?!data:)', text)
    assert LOOKS[theme].paper in text
    assert "lightning_thd" in text
    assert re.findall(r'<img alt="([^"]+)"', text) == ["loss; MFU [%]; fill [%]"]
    assert "prefers-color-scheme" not in text
    assert "nan" not in re.sub(r"base64,[^\"]*", "", text)


def test_the_page_follows_the_dark_setting_of_its_reader(tmp_path: Path) -> None:
    text = page(SERIES, tmp_path / "report.html").read_text()
    assert all(look.paper in text for look in LOOKS.values())
    assert len(re.findall(r'(?:src|srcset)="data:image/png', text)) == 2
    assert re.search(r'<source media="\(prefers-color-scheme: dark\)"', text)


def test_what_repeats_is_left_out() -> None:
    mfu = SERIES["train/device/mfu"]
    one = {"train/device/mfu": mfu, "train/device/hfu": mfu, "train/packing/imbalance": [(1, 1.0), (2, 1.0)]}
    assert [row[0] for row in table(one).rows] == ["MFU"]
    several = {**one, "train/device/hfu": [(1, 0.75)], "train/packing/imbalance": [(1, 1.0), (2, 1.1)]}
    assert [row[0] for row in table(several).rows] == ["MFU", "HFU", "slowest rank / mean work"]


@pytest.mark.parametrize("theme", LOOKS)
def test_the_picture_is_drawn(theme: Theme, tmp_path: Path) -> None:
    assert picture(SERIES, tmp_path / "report.png", theme=theme).read_bytes().startswith(b"\x89PNG")


def test_a_waterfall_ends_where_its_parts_add_up_to() -> None:
    seconds = dict(zip(PARTS, (0.1, 0.6, 0.2, 0.05, 0.05), strict=True))
    series = {f"train/step_time/{part}": [(10, value), (20, 3 * value)] for part, value in seconds.items()}
    assert list(step_times(series).values()) == pytest.approx([200, 1200, 400, 100, 100])
    assert step_times(SERIES) == {}
    axes = new_figure(5, 3, "light").add_subplot()
    draw_waterfall(axes, series)
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    starts = [bar.get_x() for bar in axes.patches]
    assert starts == pytest.approx([0, *ends[:-1]])
    assert ends[-1] == pytest.approx(2000)
    assert "forward, backward, exchange  1,200.0 ms, 60%" in [text.get_text() for text in axes.texts]


def test_curves_are_inside_their_axes() -> None:
    series = {
        "train/loss": [(0, 1.0), (1, -3.0)],  # preference losses may be below 0
        "train/device/real_items_per_sec": [(0, 4_700.0), (1, 4_710.0), (2, 4_705.0)],
        "train/packing/fill": [(0, 0.99)],
    }
    loss, rate, fill = (figure := draw_page(series, "light")).axes
    figure.canvas.draw()
    assert fill.get_window_extent().width > 1.8 * loss.get_window_extent().width  # alone in its row
    assert loss.get_ylim()[0] < -3
    assert rate.get_ylim()[0] == 0
    assert rate.get_ylim()[1] > 4_900  # not along the upper edge
    assert fill.lines[0].get_marker() == "o"  # a line of one point is none
    assert rate.lines[0].get_marker() == "None"
