"""A run's metrics -> one page: the numbers that matter on top, curves below, versions at the foot."""

from __future__ import annotations

import base64
import html
import io
import math
import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from string import Template
from typing import Any

from lightning_thd._checks import instance
from lightning_thd.report.look import CYCLE, Theme, dress, legend, look_of, new_figure
from lightning_thd.report.rows import ROWS, Series, number
from lightning_thd.report.waterfall import draw_waterfall, step_times

# The curves of a page; metrics on one axes share their unit.
_CURVES = (
    ("train/loss",),
    ("train/device/real_items_per_sec",),
    ("train/device/mfu", "train/device/hfu"),
    ("train/packing/fill", "train/packing/attention_fraction"),
)
_TOP = ("train/loss", "train/device/real_items_per_sec", "train/device/mfu", "train/packing/fill")

_PAGE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Training run</title>
<style>
body { background: $paper; color: $ink; font: 15px system-ui, sans-serif; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem }
.cards, .curves { display: grid; gap: 1rem; margin: 1.5rem 0 }
.cards { grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)) }
.curves { grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)) }
.card { border: 1px solid $quiet; border-radius: .5rem; padding: .8rem }
.card b { display: block; font-size: 1.6rem }
img { width: 100% }
td { padding: .2rem 0 }
td + td { text-align: right; padding-left: .8rem }
small { opacity: .75 }
</style>
<h1>Training run</h1>
<div class="cards">$cards</div>
<div class="curves">$curves</div>
<table><tr><td></td><td>first</td><td>median</td><td>last</td></tr>$rows</table>
<p><small>$versions</small></p>
</html>
""")


def picture(series: Series, file: str | Path, *, theme: Theme = "light") -> Path:
    """Draw the page of a run as a PNG.

    Args:
        series: of ``read_metrics``.
        file: where to.
        theme: ``light`` or ``dark``.

    Returns:
        The file.

    Raises:
        ModuleNotFoundError: without matplotlib.
        ValueError: for a folder.
    """
    instance(series, "series", dict, advice="Pass read_metrics(folder).")
    path = _file(file, "report.png")
    figure = draw_page(series, theme)
    figure.savefig(path, dpi=120, facecolor=figure.get_facecolor())
    return path


def _file(given: str | Path, such_as: str) -> Path:
    path = Path(given)
    if path.is_dir():
        raise ValueError(f"{path} is a folder. Pass the file to write, such as {path / such_as}.")
    return path


def page(series: Series, file: str | Path, *, theme: Theme = "light") -> Path:
    """Write the page of a run as one HTML file that needs no other.

    Args:
        series: of ``read_metrics``.
        file: where to.
        theme: ``light`` or ``dark``.

    Returns:
        The file.

    Raises:
        ValueError: for a folder.
    """
    instance(series, "series", dict, advice="Pass read_metrics(folder).")
    look, path = look_of(theme), _file(file, "report.html")
    cards = "".join(
        f'<div class="card"><b>{html.escape(value)}</b><span>{html.escape(title)}</span></div>'
        for title, value in _headlines(series)
    )
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in _table(series)
    )
    path.write_text(
        _PAGE.substitute(
            paper=look.paper,
            ink=look.ink,
            quiet=look.quiet,
            cards=cards,
            curves="".join(_embedded(series, theme)),
            rows=rows,
            versions=html.escape(_versions()),
        )
    )
    return path


def draw_page(series: Series, theme: Theme) -> Any:
    """Draw a run's last numbers, its curves, and where the time of its steps goes."""
    look = look_of(theme)
    shown = _shown(series)
    panels = len(shown) + bool(step_times(series))
    rows = math.ceil(panels / 2)
    figure = new_figure(9, 1.4 + 2.5 * rows, theme)
    grid = figure.add_gridspec(max(rows, 1), 2)
    told = "      ".join(f"{value}  {title}" for title, value in _headlines(series))
    figure.suptitle(told, color=look.ink, fontsize=12, x=0.02, ha="left")
    for i, names in enumerate(shown):
        axes = figure.add_subplot(grid[i // 2, slice(None) if i == panels - 1 and panels % 2 else i % 2])
        _draw_curve(axes, series, names, theme)
    if panels > len(shown):
        across = slice(None) if panels % 2 else 1  # alone in its row it takes the whole row
        draw_waterfall(figure.add_subplot(grid[rows - 1, across]), series, theme=theme)
    figure.supxlabel(_versions(), color=look.ink, alpha=0.75, fontsize=8)
    return figure


def _shown(series: Series) -> list[tuple[str, ...]]:
    """Return the metrics of each curve, those that the run logged."""
    found = (tuple(name for name in names if _finite(series, name)) for names in _CURVES)
    return [names for names in found if names]


def _draw_curve(axes: Any, series: Series, names: Sequence[str], theme: Theme) -> None:
    for colour, line, name in zip(CYCLE, ("-", "--"), names, strict=False):
        points = _finite(series, name)
        axes.plot(
            [step for step, _ in points],
            [v for _, v in points],
            color=colour,
            linestyle=line,
            marker="o" if len(points) < 3 else None,  # a line of one point is none
            label=ROWS[name].title,
        )
    dress(axes, theme, title=_title(names), x="step")
    values = [v for name in names for _, v in _finite(series, name)]
    axes.set_ylim(min(0.0, 1.08 * min(values)), max(0.0, 1.08 * max(values)) or None)
    axes.xaxis.get_major_locator().set_params(nbins=6)
    if len(names) > 1:
        legend(axes, theme)


def _title(names: Sequence[str]) -> str:
    unit = ROWS[names[0]].unit
    return " and ".join(ROWS[name].title for name in names) + (f" [{unit}]" if unit else "")


def _embedded(series: Series, theme: Theme) -> Iterator[str]:
    """Yield an ``img`` of each curve and of the waterfall, each with its picture inside."""
    for names in _shown(series):
        figure = new_figure(4.8, 2.7, theme)
        _draw_curve(figure.add_subplot(), series, names, theme)
        yield _img(figure, _title(names))
    if step_times(series):
        figure = new_figure(4.8, 2.7, theme)
        draw_waterfall(figure.add_subplot(), series, theme=theme)
        yield _img(figure, "where the time of a step goes")


def _img(figure: Any, alt: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=200, format="png", facecolor=figure.get_facecolor())  # twice a screen's
    image = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{image}">'


def _finite(series: Series, name: str) -> list[tuple[int, float]]:
    factor = ROWS[name].factor
    return [(step, value * factor) for step, value in series.get(name, []) if math.isfinite(value)]


def _headlines(series: Series) -> list[tuple[str, str]]:
    """Return the top numbers of a page: the last loss, and the medians of rates."""
    found = []
    for name in _TOP:
        values = [value for _, value in _finite(series, name)]
        if values:
            value = values[-1] if name == "train/loss" else _median(values)
            found.append((ROWS[name].title, number(value) + ROWS[name].unit))
    return found


def _table(series: Series) -> list[tuple[str, ...]]:
    rows = []
    for name, row in ROWS.items():
        values = [value for _, value in _finite(series, name)]
        if values:
            cells = (values[0], _median(values), values[-1])
            rows.append((row.title, *(number(cell) + row.unit for cell in cells)))
    return rows


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for name in ("lightning_thd", "torch", "lightning", "transformers"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)
