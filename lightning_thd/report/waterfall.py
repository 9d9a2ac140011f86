"""A run's step times -> a waterfall: what a step waits for and computes, one part below the other."""

from __future__ import annotations

import math
from typing import Any

from lightning_thd.report.look import CYCLE, Theme, dress, look_of
from lightning_thd.report.rows import Series

# In the order of a step; the keys of THDThroughputMonitor, below train/step_time/.
PARTS = {
    "data_wait": "wait for data",
    "forward_backward": "forward, backward, exchange",
    "optimizer": "optimizer",
    "checkpoint": "checkpoint",
    "other": "logging and the rest",
}


def step_times(series: Series) -> dict[str, float]:
    """Average the parts of a step over the run that ``read_metrics`` read.

    Returns:
        Title of a part -> milliseconds a step, in the order of a step; empty where the run did not log them.
        Every interval counts alike: ``[(10, 0.2), (20, 0.4)]`` gives 300.
    """
    found = {}
    for part, title in PARTS.items():
        values = [value for _, value in series.get(f"train/step_time/{part}", []) if math.isfinite(value)]
        if values:
            found[title] = 1e3 * sum(values) / len(values)
    return found


def draw_waterfall(axes: Any, series: Series, *, theme: Theme = "light") -> None:
    """Draw the parts of a mean step as bars, each beginning where the one above ends."""
    times, at = step_times(series), 0.0
    total = max(sum(times.values()), 1e-9)
    for row, (colour, (title, ms)) in enumerate(zip(CYCLE, times.items(), strict=False)):
        axes.barh(row, ms, left=at, color=colour, height=0.4)
        told = f"{title}  {ms:,.1f} ms, {ms / total:.0%}"
        axes.text(0.005 * total, row - 0.4, told, color=look_of(theme).ink, fontsize=9, va="center")
        at += ms
    dress(axes, theme, title="where the time of a step goes", x="ms since the step began", grid=False)
    axes.set_yticks([])
    axes.set_ylim(len(times) - 0.6, -0.7)
    axes.set_xlim(0, total)
