"""A theme, light or dark -> the colours and axes of all pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from lightning_thd._imports import require

Theme: TypeAlias = Literal["light", "dark"]

# Six of Okabe and Ito's eight colours, which people with any colour vision can distinguish
# (jfly.uni-koeln.de/color, 2008). Black is left out, and so is yellow, which is hard to see on white.
CYCLE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """Colours of one theme."""

    paper: str  # background
    ink: str  # text
    quiet: str  # axes and grid
    padding: str  # empty slots


LOOKS: dict[Theme, Look] = {
    "light": Look(paper="#ffffff", ink="#1f2328", quiet="#9aa4af", padding="#e6e8eb"),
    "dark": Look(paper="#16191d", ink="#e6e9ec", quiet="#6b7580", padding="#343a40"),
}


def look_of(theme: Theme) -> Look:
    """Return the colours of a theme; raise ValueError for any other name."""
    if theme not in LOOKS:
        raise ValueError(f"theme={theme!r} is not one of {', '.join(map(repr, LOOKS))}.")
    return LOOKS[theme]


def new_figure(width: float, height: float, theme: Theme) -> Any:
    """Make an empty matplotlib figure in a theme's colours; its size is in inches."""
    require("matplotlib", feature="a picture")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor=look_of(theme).paper)


def dress(axes: Any, theme: Theme, *, title: str, x: str, y: str = "", grid: bool = True) -> None:
    """Set the colours, title, labels and faint horizontal grid lines of matplotlib axes."""
    look = look_of(theme)
    axes.set_facecolor(look.paper)
    axes.set_title(title, color=look.ink, fontsize=11, loc="left")
    axes.set_xlabel(x, color=look.ink)
    axes.set_ylabel(y, color=look.ink)
    axes.tick_params(colors=look.ink, labelsize=9)

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(short)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(look.quiet)

    axes.xaxis.get_major_locator().set_params(integer=True, nbins=8)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(axis="y", color=look.quiet, alpha=0.25, linewidth=0.8)


def short(value: float, _: int | None = None) -> str:
    """Format a number with few characters, so that tick labels do not overlap: 131072 as 131.072k."""
    # (from, unit, letter): thousands begin at ten thousand, because 1,024 is as short as 1.024k.
    for least, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"


def legend(axes: Any, theme: Theme, **kwargs: Any) -> None:
    """Add a legend without a frame, in the theme's text colour."""
    axes.legend(frameon=False, labelcolor=look_of(theme).ink, fontsize=9, **kwargs)
