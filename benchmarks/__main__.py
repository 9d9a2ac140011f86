"""Every CPU benchmark, one after the other: one table with every goal, written to benchmarks/RESULTS.md.

``python -m benchmarks`` takes about thirty minutes on two cores, which must have nothing else to do.
``--only packing loss`` runs some and prints their table without writing the file. What a GPU found
(``python -m benchmarks.gpu --json benchmarks/gpu.json``) is added where that file exists.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lightning
import torch

from benchmarks import results
from benchmarks.results import Result

HERE = Path(__file__).parent
NAMES = (
    "import_time",
    "leaks",
    "segments",
    "packing",
    "balance",
    "loading",
    "streams",
    "attention",
    "loss",
    "throughput_overhead",
    "fp8",
    "flops",
    "strategy_overhead",
    "context_balance",
    "dynamic_cp",
    "pipeline",
    "cuda_graph_plan",
    "end_to_end",
)


def run(name: str) -> list[Result]:
    """Run one benchmark in a process of its own, its output on the screen; its results."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        subprocess.run([sys.executable, "-m", "benchmarks", "--child", name, str(file)], check=True)
        return [Result(**row) for row in json.loads(file.read_text())]


def run_here(name: str, file: str) -> None:
    """What ``run`` runs."""
    importlib.import_module(f"benchmarks.{name}").main([])
    Path(file).write_text(json.dumps([asdict(row) for row in results.FOUND]))


def machine() -> str:
    """Processor, cores and versions."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    versions = f"torch {torch.__version__}, lightning {lightning.__version__}"
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}"


def report(rows: list[tuple[str, Result]], seconds: float, failed: list[str]) -> str:
    """The file."""
    missed = [row for _, row in rows if not row.met]
    lines = [
        "# Results",
        "",
        f"Written by `python -m benchmarks` on {datetime.now(UTC):%Y-%m-%d} in {seconds / 60:.0f} minutes: "
        f"{machine()}. {len(rows) - len(missed)} of {len(rows)} goals are met.",
        "",
        *results.table(rows),
        "",
        "A ratio says how many times better ours is than the peer's.",
        *(f"`benchmarks.{name}` ended with an error and is missing." for name in failed),
    ]
    gpu = HERE / "gpu.json"
    lines += ["", "## On a GPU", ""]
    if gpu.exists():
        lines += gpu_lines(json.loads(gpu.read_text()))
    else:
        lines += ["Not run yet: `python -m benchmarks.gpu --json benchmarks/gpu.json`."]
    return "\n".join(lines) + "\n"


def gpu_lines(found: dict[str, Any]) -> list[str]:
    """What ``benchmarks.gpu`` wrote, as a table."""
    from benchmarks.gpu import Result as Part
    from benchmarks.gpu import Row, table

    parts = [Part(**{**part, "rows": [Row(**row) for row in part["rows"]]}) for part in found["parts"]]
    about = f"`{found['command']}` on {found['date']}: {found['device']}, torch {found['torch']}."
    return [about, "", table(parts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run_here(*arguments.child)
        return
    rows: list[tuple[str, Result]] = []
    failed: list[str] = []
    start = time.perf_counter()
    for name in arguments.only or NAMES:
        print(f"\n===== {name}", flush=True)
        try:
            rows += [(name, row) for row in run(name)]
        except subprocess.CalledProcessError:
            failed.append(name)
        text = report(rows, time.perf_counter() - start, failed)
        if not arguments.only:  # again after each, so that a run that is cut short leaves what it has
            (HERE / "RESULTS.md").write_text(text)
    print("\n" + text)


if __name__ == "__main__":
    main()
