"""Pictures of packs: what is drawn is what was given, in both themes; what cannot be drawn is refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lightning_thd.report.look import LOOKS, Theme, look_of, short
from lightning_thd.report.packs import draw_lengths, draw_packs, draw_work

PACKS = [[3, 5, 2], [9], [4, 4]]


def bars(figure: Any) -> list[tuple[float, float]]:
    return [(bar.get_x(), bar.get_width()) for bar in figure.axes[0].patches]


@pytest.mark.parametrize("theme", LOOKS)
def test_lanes_lie_end_to_end(theme: Theme, tmp_path: Path) -> None:
    figure = draw_packs(PACKS, 10, theme=theme)
    wanted = [(0, 10), (0, 3), (3, 5), (8, 2), (0, 10), (0, 9), (0, 10), (0, 4), (4, 4)]
    assert bars(figure) == wanted
    assert figure.axes[0].get_title(loc="left") == "3 packs, 6 sequences, 90.0% filled"
    figure.savefig(tmp_path / "packs.png")
    assert (tmp_path / "packs.png").stat().st_size > 5_000


def test_what_another_sequence_holds_is_not_drawn() -> None:
    figure = draw_packs([[6, 8, 6, 3], [5]], 12, held=[[0, 6, 6, 0], [0]])
    assert bars(figure) == [(0, 12), (0, 6), (6, 2), (8, 0), (8, 3), (0, 12), (0, 5)]
    colours = [bar.get_facecolor()[:3] for bar in figure.axes[0].patches]
    assert colours[1] == colours[2] != colours[4]  # a colour for each tree
    assert figure.axes[0].get_title(loc="left") == "2 packs, 5 sequences, 66.7% filled, 42.9% shared"
    with pytest.raises(ValueError, match="A pack holds 14 tokens but capacity=12"):
        draw_packs([[6, 8]], 12)


def test_work_says_how_much_slower_the_slowest_rank_is() -> None:
    figure = draw_work([1.0, 3.0], [2.0, 2.0])
    said = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert said == ["as it comes: 1.50 x mean", "planned: 1.00 x mean"]


@pytest.mark.parametrize("theme", LOOKS)
def test_the_others_draw(theme: Theme, tmp_path: Path) -> None:
    draw_lengths([3, 5, 2, 9], PACKS, 10, theme=theme).savefig(tmp_path / "lengths.png")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: draw_packs([[11]], 10), "A pack holds 11 tokens but capacity=10"),
        (lambda: draw_packs([], 0), "capacity=0; wanted the slots of a pack"),
        (lambda: draw_work([1.0], [1.0, 2.0]), "1 ranks before and 2 after"),
        (lambda: look_of("pink"), "theme='pink' is not one of 'light', 'dark'"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_drawn(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_packs_fill_their_picture_and_narrow_sequences_have_no_edge() -> None:
    axes = draw_packs([[1, 999]] * 40, 1000).axes[0]
    assert axes.get_ylim() == (39.5, -0.5)  # no empty bands above and below
    padding, narrow, wide = axes.patches[:3]
    assert [bar.get_width() for bar in (padding, narrow, wide)] == [1000, 1, 999]
    assert narrow.get_linewidth() == 0  # an edge in the colour of the paper would hide it
    assert wide.get_linewidth() > 0


def test_ticks_are_short() -> None:
    told = {131072: "131.072k", 20_000: "20k", 2_500_000: "2.5M", 8_192: "8192", 0.25: "0.25", 0: "0"}
    assert {value: short(value) for value in told} == told
    figure = draw_lengths([10, 120_000], [[120_010]], 131_072)
    figure.canvas.draw()
    for axes in figure.axes:
        extents = [x.get_window_extent() for x in axes.get_xticklabels() if x.get_text()]
        assert all(a.x1 < b.x0 for a, b in pairwise(extents))
        assert all(float(x.get_text()).is_integer() for x in axes.get_yticklabels() if x.get_text())
