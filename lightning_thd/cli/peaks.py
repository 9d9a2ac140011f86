"""``lightning-thd peaks``: the dense peaks of devices, with their sources."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from lightning_thd.cli.arguments import Parser, nearest
from lightning_thd.flops.peaks import PEAKS, Peak, find_peak
from lightning_thd.report.terminal import Table, show_table

_DTYPES = ("bf16", "fp16", "tf32", "fp32", "fp8", "fp4")


def peaks_table(rows: Sequence[Peak]) -> Table:
    """Build a table of dense TFLOP/s by dtype; sources are numbered and listed below it."""
    sources = list(dict.fromkeys(row.source for row in rows))
    return Table(
        columns=("device", *_DTYPES, "printed", "source"),
        rows=[
            (
                row.name,
                *("-" if (peak := getattr(row, name)) is None else f"{peak:g}" for name in _DTYPES),
                row.printed,
                f"[{1 + sources.index(row.source)}]",
            )
            for row in rows
        ],
        text=(0, len(_DTYPES) + 1),
        foot="\n".join(f"[{i}] {source}" for i, source in enumerate(sources, 1)),
    )


def nearest_device(given: str) -> str:
    """Return "; did you mean X?" for the known device with the most similar name, or "."."""
    return nearest(given.lower().removeprefix("nvidia ").removeprefix("amd "), [row.name for row in PEAKS])


def peaks(arguments: Sequence[str]) -> None:
    """Run ``lightning-thd peaks [DEVICE] [--json]``."""
    parser = Parser(
        prog="lightning-thd peaks",
        description="List the dense peaks from which MFU is computed, in TFLOP/s, and their sources.",
        epilog='example: lightning-thd peaks "NVIDIA H200"',
    )
    parser.add_argument("device", nargs="?", help="a device name, as torch.cuda.get_device_name returns it")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    rows: Sequence[Peak] = PEAKS
    if given.device is not None:
        row = find_peak(given.device)
        if row is None:
            meant = nearest_device(given.device)
            parser.error(
                f"no peak is known for {given.device!r}{meant} Pass THDThroughputMonitor(peak=<dense "
                "FLOP/s>), or peak='measure' to time matmuls; `lightning-thd peaks` lists what is known."
            )
        rows = [row]
    if given.json:
        sys.stdout.write(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    else:
        show_table(peaks_table(rows))
