"""The ``metrics.csv`` or event files of a run -> a table, and a picture with numbers, curves and versions."""

from __future__ import annotations

import base64
import csv
import html
import io
import math
import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from string import Template
from typing import Any, Literal, NamedTuple, TypeAlias

from lightning_thd._imports import installed
from lightning_thd._pages import see
from lightning_thd.report.look import CYCLE, Theme, dress, legend, look_of, new_figure
from lightning_thd.report.terminal import Table

Series: TypeAlias = dict[str, list[tuple[int, float]]]  # metric -> (step, value), sorted by step
PageTheme: TypeAlias = Literal["auto"] | Theme


class Row(NamedTuple):
    """The title and unit of a metric in a report, and the factor for its values."""

    title: str
    unit: str
    factor: float


ROWS = {
    "train/loss": Row("loss", "", 1.0),
    "train/device/real_items_per_sec": Row("real tokens/s/device", "", 1.0),
    "train/device/tflops_per_gpu": Row("TFLOP/s/device", "", 1.0),
    "train/device/mfu": Row("MFU", "%", 100.0),
    "train/device/hfu": Row("HFU", "%", 100.0),
    "train/packing/fill": Row("fill", "%", 100.0),
    "train/packing/imbalance": Row("slowest rank / mean work", "", 1.0),
    "train/packing/attention_fraction": Row("attention share of FLOPs", "%", 100.0),
}
_CURVES = (
    ("train/loss",),
    ("train/device/real_items_per_sec",),
    ("train/device/mfu", "train/device/hfu"),
    ("train/packing/fill", "train/packing/attention_fraction"),
)
_TOP = ("train/loss", "train/device/real_items_per_sec", "train/device/mfu", "train/packing/fill")
# Packs of Packs(n) are fuller than this. A fill below this share of their median is a pack of what was left.
_FULL = 0.9
# The parts of a step in their order; THDThroughputMonitor logs them under train/step_time/.
PARTS = {
    "data_wait": "wait for data",
    "forward_backward": "forward, backward, exchange",
    "optimizer": "optimizer",
    "checkpoint": "checkpoint",
    "other": "logging and the rest",
}

_DARK = "(prefers-color-scheme: dark)"
_PHONE = "(max-width: 40rem)"  # two charts side by side are unreadable on narrower pages
_PAGE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Training run</title>
<style>
body { font: 15px system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
img { width: 100% }
td { padding: .2rem 0 }
td + td { text-align: right; padding-left: .8rem; white-space: nowrap }
.foot { white-space: pre-line }
$colours
</style>
<h1>Training run</h1>
<picture>$images</picture>
<table>$rows</table>
</html>
""")


def number(value: float) -> str:
    """Format a number with few digits: 4662.8 as 4,663, and 0.11873 as 0.1187."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def read_metrics(folder: str | Path) -> Series:
    """Read the metrics below a folder: every ``metrics.csv``, or else every event file of TensorBoard.

    A later run replaces all values from its first step on.
    """
    files = _files(folder, "metrics.csv") or _files(folder, "*.tfevents.*")
    if not files:
        raise ValueError(
            f"No metrics.csv below {folder}, and no event file of TensorBoard. Train with "
            f"logger=CSVLogger({str(folder)!r}) or TensorBoardLogger({str(folder)!r}), or with a list of it "
            f"and other loggers. {see('report')}"
        )

    metrics: dict[str, dict[int, float]] = {}  # metric -> step -> value
    for file in files:
        run = _read_table(file) if file.suffix == ".csv" else _read_events(file)
        for name, values in run.items():  # a resumed run repeats the steps after its checkpoint
            first = min(values)
            before = {step: value for step, value in metrics.get(name, {}).items() if step < first}
            metrics[name] = before | values
    if "train/loss_step" in metrics:  # logged with on_step=True and on_epoch=True
        metrics.setdefault("train/loss", metrics["train/loss_step"])
    return {name: sorted(values.items()) for name, values in metrics.items()}


def _files(folder: str | Path, pattern: str) -> list[Path]:
    """Return the files below a folder that match the pattern, the oldest first."""
    return sorted(Path(folder).rglob(pattern), key=lambda file: file.stat().st_mtime)


def _read_table(file: Path) -> dict[str, dict[int, float]]:
    """Read a file of CSVLogger: metric -> step -> value."""
    run: dict[str, dict[int, float]] = {}
    try:
        with file.open(newline="") as lines:
            for row in csv.DictReader(lines):
                step = int(float(row.pop("step")))
                for name, text in row.items():
                    if text and name != "epoch":
                        run.setdefault(name, {})[step] = float(text)
    except (ValueError, KeyError, TypeError) as err:  # text, no column of steps, or a torn row
        raise ValueError(f"{file} is not a table of CSVLogger ({err!r}). Repair or remove it.") from err
    return run


def _read_events(file: Path) -> dict[str, dict[int, float]]:
    """Read the scalars of an event file of TensorBoard: metric -> step -> value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(file), size_guidance={"scalars": 0})  # 0 keeps every value
    events.Reload()
    names = [name for name in events.Tags()["scalars"] if name != "epoch"]
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in names}


def processor() -> str:
    """Return the name of this machine's processor and its number of cores."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        if models:
            name = models[0].partition(":")[2].strip()
    return f"{name}, {os.cpu_count()} cores"


def peak_tflops(series: Series) -> float | None:
    """Return the peak TFLOP/s of a device that a run's MFU is a share of; None without MFU."""
    rates = dict(series.get("train/device/tflops_per_gpu", []))
    shares = dict(series.get("train/device/mfu", []))
    peaks = [rates[step] / share for step, share in shares.items() if step in rates and share > 0]
    finite = [peak for peak in peaks if math.isfinite(peak)]
    return median(finite) if finite else None


def table(series: Series) -> Table:
    """Build a table of the first, median and last values that a training run logged, and MFU's peak."""
    rows = []
    for name, row in ROWS.items():
        values = [value for _, value in _finite(series, name, last=True)]
        if values:
            last = series[name][-1][1] * row.factor  # may be NaN, which a reader must see
            cells = (values[0], median(values), last)
            rows.append((row.title, *(number(cell) + row.unit for cell in cells)))

    peak = peak_tflops(series)
    notes = []
    if peak is not None:
        notes.append(f"MFU is the share of {number(peak)} TFLOP/s, the peak of a device.")
    if dip := _dip(series):
        notes.append(dip)
    return Table(columns=("", "first", "median", "last"), rows=rows, foot="\n".join(notes))


def _dip(series: Series) -> str:
    """Explain the lowest fill of a run of full packs if it is far below their median, else return ""."""
    logged = [(value, step) for step, value in series.get("train/packing/fill", []) if math.isfinite(value)]
    if not logged:
        return ""
    lowest, step = min(logged)
    middle = median(value for value, _ in logged)
    if middle < _FULL or lowest >= _FULL * middle:
        return ""
    return (
        f"Fill fell to {lowest:.1%} at step {step}: the last packs of an epoch, and of each window= of "
        "sequences that are packed together, hold what is left."
    )


def show(folder: str | Path, *, theme: PageTheme = "auto") -> None:
    """Print the table of a run and, if matplotlib is installed, write its picture and page beside the logs.

    ``folder`` is the one that you passed to ``CSVLogger`` or ``TensorBoardLogger``. The theme ``auto``
    follows the reader's setting.
    """
    series = read_metrics(folder)
    metrics = table(series)
    if not metrics.rows:
        raise ValueError(
            f"The logs below {folder} have none of {', '.join(ROWS)}. Log train/loss, or give the Trainer "
            f"THDThroughputMonitor(). {see('report')}"
        )
    print(f"\n{metrics}\n")  # noqa: T201
    if installed("matplotlib"):
        png = picture(series, Path(folder) / "report.png", theme=_first_theme(theme))
        page(series, Path(folder) / "report.html", theme=theme)
        print(f"Picture: {png}, to share: {png.with_suffix('.html')}")  # noqa: T201


def picture(series: Series, file: str | Path, *, theme: Theme = "light") -> Path:
    """Draw the numbers and curves of ``read_metrics`` into a PNG file; this needs matplotlib."""
    figure = draw_page(series, theme)
    figure.savefig(file, dpi=120, facecolor=figure.get_facecolor())
    return Path(file)


def page(series: Series, file: str | Path, *, theme: PageTheme = "auto") -> Path:
    """Write a run's picture and table as one HTML file; ``auto`` is the reader's theme. Needs matplotlib."""
    first = _first_theme(theme)
    colours = _colours(first)
    sources = [(_PHONE, first, 1)]
    if theme == "auto":
        colours += f" @media {_DARK} {{ {_colours('dark')} }}"
        # A reader's browser shows the first picture whose condition holds.
        sources = [(f"{_PHONE} and {_DARK}", "dark", 1), (_DARK, "dark", 2), *sources]
    images = "".join(
        f'<source media="{condition}" srcset="{_data_of(series, of_source, columns)}">'
        for condition, of_source, columns in sources
    )
    alternative = html.escape("; ".join(map(_title, _shown(series))))  # for readers who see no picture
    images += f'<img alt="{alternative}" src="{_data_of(series, first, 2)}">'

    metrics = table(series)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in (metrics.columns, *metrics.rows)
    )
    if metrics.foot:
        rows += f"<tr><td class=foot colspan=4>{html.escape(metrics.foot)}</td></tr>"
    Path(file).write_text(_PAGE.substitute(colours=colours, images=images, rows=rows))
    return Path(file)


def _first_theme(theme: PageTheme) -> Theme:
    """Return the theme of a page where the reader's setting is not known."""
    return "light" if theme == "auto" else theme


def _colours(theme: Theme) -> str:
    """Return the page's colours as CSS."""
    return f"body {{ background: {look_of(theme).paper}; color: {look_of(theme).ink} }}"


def _data_of(series: Series, theme: Theme, columns: int) -> str:
    """Return a run's picture as the URL of its data, so that the page is one file."""
    figure = draw_page(series, theme, columns=columns)
    image = io.BytesIO()
    figure.savefig(image, dpi=200, format="png", facecolor=figure.get_facecolor())  # twice a screen's dpi
    return f"data:image/png;base64,{base64.b64encode(image.getvalue()).decode()}"


def draw_page(series: Series, theme: Theme, *, columns: int = 2) -> Any:
    """Draw a run's headline numbers, its curves, the parts of a step's time, and the installed versions.

    One column suits a phone, two suit a screen.
    """
    look = look_of(theme)
    curves = _shown(series)
    panels = len(curves)
    if step_times(series):
        panels += 1
    rows = max(math.ceil(panels / columns), 1)
    above, below = "      ".join(_headlines(series)), ", ".join(_versions())
    if columns == 1:
        above = "\n".join(_headlines(series))
        below = "\n".join(", ".join(_versions()[i : i + 3]) for i in (0, 3))
    lines = above.count("\n") + below.count("\n")
    figure = new_figure(4.5 * columns, 1.4 + 2.5 * rows + 0.2 * lines, theme)
    figure.get_layout_engine().set(h_pad=0.09)  # inches, so that headlines are no part of the first charts
    grid = figure.add_gridspec(rows, columns)
    for i in range(panels):
        row, column = divmod(i, columns)
        takes_row = i == panels - 1 and column == 0  # the last panel, if it has no neighbour
        axes = figure.add_subplot(grid[row, slice(None) if takes_row else column])
        if i < len(curves):
            _draw_curve(axes, series, curves[i], theme)
        else:
            draw_waterfall(axes, series, theme=theme)

    longest = max(len(line) for line in above.splitlines() or [""])
    size = min(12.0, 550 * columns / max(1, longest))  # so that no line is wider than the figure
    figure.suptitle(above, color=look.ink, fontsize=size, x=0.02, ha="left")
    figure.supxlabel(below, color=look.ink, alpha=0.75, fontsize=8)
    return figure


def step_times(series: Series) -> dict[str, float]:
    """Return the mean of each logged part of a step over a run, in milliseconds by title."""
    means = {}
    for part, title in PARTS.items():
        logged = series.get(f"train/step_time/{part}", [])
        seconds = [value for _, value in logged if math.isfinite(value)]
        if seconds:
            means[title] = 1e3 * sum(seconds) / len(seconds)
    return means


def draw_waterfall(axes: Any, series: Series, *, theme: Theme = "light") -> None:
    """Draw the parts of a mean step as bars; each bar starts at the end of the bar above."""
    times = step_times(series)
    total = max(sum(times.values()), 1e-9)  # above 0, because the shares divide by it
    start = 0.0
    for row, (colour, (title, ms)) in enumerate(zip(CYCLE, times.items(), strict=False)):
        axes.barh(row, ms, left=start, color=colour, height=0.4)
        label = f"{title}  {ms:,.1f} ms, {ms / total:.0%}"
        axes.text(0.005 * total, row - 0.4, label, color=look_of(theme).ink, fontsize=9, va="center")
        start += ms
    dress(axes, theme, title="where the time of a step goes", x="ms since the step began", grid=False)
    axes.set_yticks([])
    axes.set_ylim(len(times) - 0.6, -0.7)
    axes.set_xlim(0, total)


def _shown(series: Series) -> list[tuple[str, ...]]:
    """Return the metrics of each panel that has finite values."""
    panels = []
    for names in _CURVES:
        shown = tuple(name for name in names if _finite(series, name))
        if shown:
            panels.append(shown)
    return panels


def _draw_curve(axes: Any, series: Series, names: Sequence[str], theme: Theme) -> None:
    """Draw one or two metrics over the steps."""
    all_values = []
    for colour, line, name in zip(CYCLE, ("-", "--"), names, strict=False):
        points = _finite(series, name)
        steps = [step for step, _ in points]
        values = [value for _, value in points]
        all_values += values
        marker = "o" if len(steps) < 3 else None  # a line with one point is invisible
        axes.plot(steps, values, color=colour, linestyle=line, marker=marker, label=ROWS[name].title)

    dress(axes, theme, title=_title(names), x="step")
    bottom = min(0.0, 1.08 * min(all_values))
    top = max(0.0, 1.08 * max(all_values))
    axes.set_ylim(bottom, top or None)  # matplotlib chooses the top if all values are 0
    axes.xaxis.get_major_locator().set_params(nbins=6)
    if len(names) > 1:
        legend(axes, theme)


def _title(names: Sequence[str]) -> str:
    """Return the title of a panel: its metrics, which have one unit."""
    title = " and ".join(ROWS[name].title for name in names)
    unit = ROWS[names[0]].unit
    return f"{title} [{unit}]" if unit else title


def _finite(series: Series, name: str, *, last: bool = False) -> list[tuple[int, float]]:
    """Return a metric's finite values in its unit; if it has none, [], or with ``last`` its last value."""
    logged = series.get(name, [])
    # HFU equal to MFU, and an imbalance of 1, say nothing new.
    if name == "train/device/hfu" and logged == series.get("train/device/mfu"):
        return []
    if name == "train/packing/imbalance" and all(value == 1 for _, value in logged):
        return []

    factor = ROWS[name].factor
    finite = [(step, value * factor) for step, value in logged if math.isfinite(value)]
    if not finite and last:
        return logged[-1:]
    return finite


def _headlines(series: Series) -> list[str]:
    """Return the numbers at the top of a page: the last loss, and medians of what varies around a level."""
    headlines = []
    for name in _TOP:
        values = [value for _, value in _finite(series, name, last=True)]
        if not values:
            continue
        if "loss" in name:
            kind = "last"
            value = series[name][-1][1]
        else:
            kind = "median"
            value = median(values)
        headlines.append(f"{number(value)}{ROWS[name].unit}  {ROWS[name].title}, {kind}")
    return headlines


def _versions() -> list[str]:
    """Return the time, and the versions of Python and of the installed packages that decide a run's speed."""
    parts = [time.strftime("%Y-%m-%d %H:%M"), f"Python {platform.python_version()}"]
    for name in ("lightning_thd", "torch", "lightning", "transformers"):
        with suppress(PackageNotFoundError):
            parts.append(f"{name} {version(name)}")
    return parts
