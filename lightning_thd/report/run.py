"""The ``metrics.csv`` files of a run -> a table of what happened and a picture of it."""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path

from lightning_thd._checks import instance
from lightning_thd._imports import installed
from lightning_thd.report.look import Theme
from lightning_thd.report.page import page, picture
from lightning_thd.report.rows import ROWS, Series, number
from lightning_thd.report.terminal import Table, show_table


def read_metrics(folder: str | Path) -> Series:
    """Read every ``metrics.csv`` below a folder, a later run's value replacing an earlier one's.

    Args:
        folder: what ``CSVLogger(folder)`` was given.

    Returns:
        For every metric its (step, value) pairs, sorted by step.

    Raises:
        ValueError: when there is no ``metrics.csv``.
    """
    files = sorted(Path(folder).rglob("metrics.csv"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise ValueError(
            f"No metrics.csv below {folder}: the report reads what CSVLogger writes. Train with "
            f"logger=CSVLogger({str(folder)!r}), beside a TensorBoardLogger in a list if you like."
        )
    found: dict[str, dict[int, float]] = {}
    for file in files:
        with file.open(newline="") as lines:
            for row in csv.DictReader(lines):
                step = int(float(row.pop("step")))
                for name, text in row.items():
                    if text and name != "epoch":
                        found.setdefault(name, {})[step] = float(text)
    return {name: sorted(values.items()) for name, values in found.items()}


def table(series: Series) -> Table:
    """Build a table of the first, median and last values that a training run logged."""
    instance(series, "series", dict, advice="Pass read_metrics(folder).")
    rows = []
    for name, (title, unit, factor) in ROWS.items():
        values = [value * factor for _, value in series.get(name, []) if math.isfinite(value)]
        if values:
            cells = (values[0], sorted(values)[len(values) // 2], values[-1])
            rows.append((title, *(number(cell) + unit for cell in cells)))
    return Table(columns=("", "first", "median", "last"), rows=rows)


def show(folder: str | Path, *, theme: Theme = "light") -> None:
    """Print the table of a run and, with matplotlib, draw its page beside the logs.

    Args:
        folder: what ``CSVLogger(folder)`` was given.
        theme: ``light`` or ``dark``.
    """
    series = read_metrics(folder)
    print()  # noqa: T201
    show_table(table(series))
    print()  # noqa: T201
    if installed("matplotlib"):
        png = picture(series, Path(folder) / "report.png", theme=theme)
        page(series, Path(folder) / "report.html", theme=theme)
        print(f"Picture: {png}, to share: {png.with_suffix('.html')}")  # noqa: T201
    if any(Path(folder).rglob("events.out.tfevents.*")):
        print(f"TensorBoard, under train/device/mfu: {_tensorboard()} --logdir {folder}")  # noqa: T201


def _tensorboard() -> str:
    """Return the path of the tensorboard command beside this Python, which PATH may lack."""
    beside = Path(sys.executable).with_name("tensorboard")
    return str(beside) if beside.exists() else "tensorboard"
