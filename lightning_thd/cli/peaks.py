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
    numbers: dict[str, int] = {}  # source -> its number, from 1 in the order of the rows
    cells = []
    for row in rows:
        number = numbers.setdefault(row.source, len(numbers) + 1)
        tflops = [_shown(getattr(row, dtype)) for dtype in _DTYPES]
        cells.append((row.name, *tflops, row.printed, f"[{number}]"))

    return Table(
        columns=("device", *_DTYPES, "printed", "source"),
        rows=cells,
        text=(0, len(_DTYPES) + 1),
        foot="\n".join(f"[{number}] {source}" for source, number in numbers.items()),
    )


def _shown(tflops: float | None) -> str:
    """Return a peak as text; "-" if the device does not have the dtype."""
    return "-" if tflops is None else f"{tflops:g}"


def nearest_device(name: str) -> str:
    """Return "; did you mean X?" for the known device with the most similar name, or "."."""
    without_maker = name.lower().removeprefix("nvidia ").removeprefix("amd ")
    return nearest(without_maker, [row.name for row in PEAKS])


def peaks(arguments: Sequence[str]) -> None:
    """Run ``lightning-thd peaks [DEVICE] [--json]``."""
    parser = Parser(
        prog="lightning-thd peaks",
        description="List the dense peaks from which MFU is computed, in TFLOP/s, and their sources.",
        epilog='example: lightning-thd peaks "NVIDIA H200"',
    )
    parser.add_argument("device", nargs="?", help="a device name, as torch.cuda.get_device_name returns it")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)

    rows: Sequence[Peak] = PEAKS
    if options.device is not None:
        row = find_peak(options.device)
        if row is None:
            parser.error(
                f"no peak is known for {options.device!r}{nearest_device(options.device)} Pass "
                "THDThroughputMonitor(peak=<dense FLOP/s>), or peak='measure' to time matmuls; "
                "`lightning-thd peaks` lists what is known."
            )
        rows = [row]

    if options.json:
        sys.stdout.write(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    else:
        show_table(peaks_table(rows))
