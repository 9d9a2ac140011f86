"""The ``metrics.csv`` files of a run -> a table of what happened and a picture of it."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_thd._imports import installed, require

Series = dict[str, list[tuple[int, float]]]

# column of metrics.csv -> (what the table calls it, unit, factor)
_ROWS = {
    "train/loss": ("loss", "", 1.0),
    "train/device/real_items_per_sec": ("real tokens/s/device", "", 1.0),
    "train/device/tflops_per_gpu": ("TFLOP/s/device", "", 1.0),
    "train/device/mfu": ("MFU", "%", 100.0),
    "train/packing/fill": ("fill", "%", 100.0),
    "train/packing/attention_fraction": ("attention share of FLOPs", "%", 100.0),
}


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
        raise ValueError(f"No metrics.csv below {folder}. Train with logger=CSVLogger({str(folder)!r}).")
    found: dict[str, dict[int, float]] = {}
    for file in files:
        with file.open(newline="") as lines:
            for row in csv.DictReader(lines):
                step = int(float(row.pop("step")))
                for name, text in row.items():
                    if text and name != "epoch":
                        found.setdefault(name, {})[step] = float(text)
    return {name: sorted(values.items()) for name, values in found.items()}


def table(series: Series) -> str:
    """Lay out first, median and last value of what a training run logs."""
    lines = [f"{'':26}{'first':>12}{'median':>12}{'last':>12}"]
    for name, (title, unit, factor) in _ROWS.items():
        values = [value * factor for _, value in series.get(name, []) if math.isfinite(value)]
        if values:
            cells = (values[0], sorted(values)[len(values) // 2], values[-1])
            lines.append(f"{title:26}" + "".join(f"{_number(cell) + unit:>12}" for cell in cells))
    return "\n".join(lines)


def picture(series: Series, file: str | Path) -> Path:
    """Draw the loss and the throughput over the steps as a PNG.

    Raises:
        ModuleNotFoundError: without matplotlib.
    """
    require("matplotlib", feature="a picture of the run")
    from matplotlib.figure import Figure

    names = ("train/loss", "train/device/real_items_per_sec", "train/device/mfu")
    shown = [name for name in names if series.get(name)]
    figure = Figure(figsize=(4.2 * max(1, len(shown)), 3.2), layout="constrained")
    for i, name in enumerate(shown):
        title, unit, factor = _ROWS[name]
        axes = figure.add_subplot(1, len(shown), i + 1)
        axes.plot(*_columns(series[name], factor), color="tab:blue", linewidth=1.6)
        axes.set_title(title + (f" [{unit}]" if unit else ""))
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
    path = Path(file)
    figure.savefig(path, dpi=120)
    return path


def show(folder: str | Path) -> None:
    """Print the table of a run and, with matplotlib, draw its picture beside the logs."""
    series = read_metrics(folder)
    print(f"\n{table(series)}\n")  # noqa: T201
    if installed("matplotlib"):
        print(f"Picture: {picture(series, Path(folder) / 'report.png')}")  # noqa: T201
    print(f"TensorBoard, under train/device/mfu: {_tensorboard()} --logdir {folder}")  # noqa: T201


def _tensorboard() -> str:
    """The command beside this Python, which need not be on PATH."""
    beside = Path(sys.executable).with_name("tensorboard")
    return str(beside) if beside.exists() else "tensorboard"


def _columns(points: Sequence[tuple[int, float]], factor: float) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value * factor for _, value in points]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
