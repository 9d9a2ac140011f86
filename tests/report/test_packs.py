"""Pictures of packs: what is drawn is what was given, in both themes; what cannot be drawn is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_thd.report.look import CYCLE, LOOKS, Theme, look_of
from lightning_thd.report.packs import draw_fill, draw_lengths, draw_packs, draw_shares, draw_work

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


def test_work_says_how_much_slower_the_slowest_rank_is() -> None:
    figure = draw_work([1.0, 3.0], [2.0, 2.0])
    said = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert said == ["as it comes: 1.50 x mean", "planned: 1.00 x mean"]


def test_shares_add_up() -> None:
    figure = draw_shares({"linear": 3.0, "attention": 1.0}, title="FLOPs")
    assert [width for _, width in bars(figure)] == [75.0, 25.0]


@pytest.mark.parametrize("theme", LOOKS)
def test_the_others_draw(theme: Theme, tmp_path: Path) -> None:
    draw_lengths([3, 5, 2, 9], PACKS, 10, theme=theme).savefig(tmp_path / "lengths.png")
    draw_fill(PACKS, 10, theme=theme).savefig(tmp_path / "fill.png")


def test_colours_are_told_apart_from_the_paper() -> None:
    for look in LOOKS.values():
        assert not {look.paper, look.padding} & set(CYCLE)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: draw_packs([[11]], 10), "A pack holds 11 tokens but capacity=10"),
        (lambda: draw_packs([], 0), "capacity=0; wanted the slots of a pack"),
        (lambda: draw_work([1.0], [1.0, 2.0]), "1 ranks before and 2 after"),
        (lambda: draw_shares({"a": 0.0}, title=""), "wanted values of 0 or more with a sum above 0"),
        (lambda: look_of("pink"), "theme='pink' is not one of 'light', 'dark'"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_drawn(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
