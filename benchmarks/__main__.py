"""Every CPU benchmark, one after the other: one table with every goal, written to benchmarks/RESULTS.md.

``python -m benchmarks`` takes about thirty minutes on two cores, which must have nothing else to do: where
others keep more than half a core busy it refuses to write the file, unless ``--loaded`` says that it may, and
then the file names the parts. ``--only packing loss`` runs some and writes nothing; on a busy machine it
warns. ``--again packing loss`` puts them in the place of what the file holds of them, each with its time. A
GPU's findings are in GPU.md.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import lightning
import torch

from benchmarks import results
from benchmarks.clock import Load
from benchmarks.results import Result

HERE = Path(__file__).parent
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>
QUIET = 0.5  # cores that others may keep busy while RESULTS.md is written
NAMES = (
    "end_to_end",
    "attention",
    "attention_kernels",
    "loss",
    "loss_counts",
    "loss_curves",
    "prefixes",
    "contrastive",
    "long_context",
    "profile_step",
    "import_time",
    "balance",
    "host_time",
    "host_flash",
    "replay_host",
    "step_launches",
    "throughput_overhead",
    "reading",
    "loading",
    "streams",
    "packing",
    "segments",
    "leaks",
    "fp8",
    "flops",
    "strategy_overhead",
    "context_balance",
    "dynamic_cp",
    "expert_bytes",
    "pipeline",
    "pipeline_engines",
    "cuda_graph_plan",
)


@dataclass(frozen=True, slots=True)
class Run:
    """One benchmark that ran: its results, its seconds, the cores others kept busy, when (UTC), and where."""

    name: str
    results: list[Result]
    seconds: float
    others: float
    failed: bool = False
    when: str = ""
    machine: str = ""


def run(name: str) -> Run:
    """Run one benchmark in a process of its own, its output on the screen."""
    adopt_orphans()
    begun, load = time.perf_counter(), Load()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        command = [sys.executable, "-m", "benchmarks", "--child", name, str(file)]
        failed = subprocess.run(command, check=False).returncode != 0
        rows = [] if failed else [Result(**row) for row in json.loads(file.read_text())]
    with suppress(ChildProcessError):
        while True:
            os.wait()
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M}"
    done = Run(name, rows, time.perf_counter() - begun, load.others(), failed, now, machine())
    print(f"----- {name}: {done.seconds:.0f} s, others kept {done.others:.2f} cores busy", flush=True)
    return done


def adopt_orphans() -> None:
    """Become the parent of processes whose parent ended, so that their CPU time counts as ours.

    Ranks of a benchmark are children of multiprocessing's fork server, which outlives the benchmark.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


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


def report(runs: list[Run]) -> str:
    """The file."""
    rows = [(one.name, row) for one in runs for row in one.results]
    missed = [row for _, row in rows if not row.met]
    seconds = sum(one.seconds for one in runs)
    others = sum(one.others * one.seconds for one in runs) / max(seconds, 1e-9)
    days = sorted(one.when[:10] for one in runs if one.when)
    measured = " and ".join(dict.fromkeys((*days[:1], *days[-1:])))  # the first day and the last
    busy = [f"`{one.name}`" for one in runs if one.others > QUIET]
    lines = [
        "# Results",
        "",
        f"Measured by `python -m benchmarks`, {measured}; the last table has the time of each part. All "
        f"took {seconds / 60:.0f} minutes. Other processes used {others:.2f} cores. "
        f"{len(rows) - len(missed)} of {len(rows)} goals are met.",
        "",
    ]
    if busy:
        lines += [
            f"The machine was busy with more than {QUIET} cores of other work during {', '.join(busy)}: read "
            "ratios and CPU seconds there, not wall seconds.",
            "",
        ]
    lines += [
        *results.table(rows),
        "",
        "A ratio above 1 means that ours is better. If ours and the peer took turns, it is the median of the "
        "rounds' ratios. Spread is half the distance between the quartiles of our rounds. Precision is the "
        f'dtype of the matrix products; "{results.HOST}" means that there are none.',
        "",
        "| benchmark | seconds | cores busy with others | ended (UTC) | on |",
        "| --- | ---: | ---: | --- | --- |",
        *(
            f"| {one.name} | {one.seconds:.0f} | {one.others:.2f} | {one.when} | {one.machine} |"
            for one in runs
        ),
        *(f"\n`benchmarks.{one.name}` ended with an error and is missing." for one in runs if one.failed),
    ]
    lines += ["", "## On a GPU", ""]
    lines += ["`benchmarks/GPU.md` has the results on a real GPU. `make gpu` measures again."]
    return "\n".join(lines) + "\n"


def write(runs: list[Run]) -> None:
    """Write RESULTS.md, and beside it what ``--again`` reads."""
    (HERE / "results.json").write_text(json.dumps([asdict(one) for one in runs], indent=1) + "\n")
    (HERE / "RESULTS.md").write_text(report(runs))


def kept() -> dict[str, Run]:
    """Return the benchmarks that RESULTS.md holds, by name."""
    file = HERE / "results.json"
    found = json.loads(file.read_text()) if file.exists() else []
    return {
        one["name"]: Run(**{**one, "results": [Result(**row) for row in one["results"]]}) for one in found
    }


def others_now(seconds: float = 5.0) -> float:
    """Return how many cores other processes keep busy now; NaN where nothing is known."""
    load = Load()
    time.sleep(seconds)
    return load.others()


def too_busy(others: float) -> str:
    """Say why nothing should be written now; empty where the machine is quiet."""
    if not others > QUIET:  # NaN, where nothing is known, is let through
        return ""
    return (
        f"Others keep {others:.2f} cores busy; RESULTS.md is written below {QUIET}. Wait until they end, "
        "look without writing by --only, or pass --loaded: the file then says so."
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--only", nargs="+", choices=NAMES, help="run these and write nothing")
    some.add_argument("--again", nargs="+", choices=NAMES, help="run these and keep the file's other rows")
    parser.add_argument(
        "--loaded", action="store_true", help="write RESULTS.md on a busy machine; it says so"
    )
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        run_here(*arguments.child)
        return 0
    writes = not arguments.only
    others = others_now()
    if writes and not arguments.loaded and (busy := too_busy(others)):
        print(busy, file=sys.stderr)
        return 1
    if others > QUIET:
        print(f"{others:.1f} cores of other work: read ratios and CPU seconds only.")
    runs = kept() if arguments.again else {}
    new: list[Run] = []
    for name in arguments.only or arguments.again or NAMES:
        print(f"\n===== {name}", flush=True)
        new.append(run(name))
        runs[name] = new[-1]
        busy_now = sum((one.others - QUIET) * one.seconds for one in new) > 0
        if writes and (arguments.loaded or not busy_now):
            # again after each, so that a run that is cut short leaves what it has
            write([runs[name] for name in NAMES if name in runs])
    print("\n" + report(new))
    if writes and not arguments.loaded and busy_now:
        print(f"Others kept more than {QUIET} cores busy: RESULTS.md was not written.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
