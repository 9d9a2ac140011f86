"""Names of logged metrics -> their titles, units and scales in a report."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

# metric -> (step, value), sorted by step
Series: TypeAlias = dict[str, list[tuple[int, float]]]


class Row(NamedTuple):
    """How a report shows a metric: its title, unit, and what values are multiplied by."""

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


def number(value: float) -> str:
    """Format a number in few digits: 4662.8 as 4,663, and 0.11873 as 0.1187."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
