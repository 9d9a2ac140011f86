"""Everything that needs a GPU, part by part, in under eight minutes: one JSON file, one table.

``python -m benchmarks.gpu --json gpu.json`` runs all parts, ``--parts attention_equal`` some; ``--list``
names them. A part is a function that yields rows; modules in ``MODULES`` register theirs with ``@part``.
The file is written again after every part: a run that is cut short keeps what it has.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

TOTAL_S = 480.0
MODULES = ["benchmarks.gpu_attention", "benchmarks.gpu_loss", "benchmarks.gpu_cuda_graph"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One finding.

    Attributes:
        case: what was measured or compared.
        value: the number.
        unit: its unit.
        goal: what was wanted, as text, or "" for information.
        met: whether the goal is met; None where there is none.
    """

    case: str
    value: float
    unit: str
    goal: str = ""
    met: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A registered part: what it shows, about how long it takes, and the function."""

    name: str
    shows: str
    seconds: float
    run: Callable[[], Iterator[Row]]


@dataclass(kw_only=True, slots=True)
class Result:
    """What a part found, or why it did not run."""

    part: str
    shows: str
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    problem: str = ""


PARTS: dict[str, Part] = {}


def part(
    name: str, *, shows: str, seconds: float
) -> Callable[[Callable[[], Iterator[Row]]], Callable[[], Iterator[Row]]]:
    """Register a part.

    Args:
        name: unique; parts run in the order of registration.
        shows: one line for the table.
        seconds: how long it takes on a current GPU; all parts together stay below TOTAL_S.
    """

    def register(run: Callable[[], Iterator[Row]]) -> Callable[[], Iterator[Row]]:
        if name in PARTS:
            raise ValueError(f"Part {name!r} is registered twice; give the second another name.")
        PARTS[name] = Part(name=name, shows=shows, seconds=seconds, run=run)
        return run

    return register


def median_us(run: Callable[[], object], *, repeats: int = 20) -> float:
    """Median time of a call on the GPU, by events, after three calls to warm up; in microseconds."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return sorted(times)[len(times) // 2]


def run_part(chosen: Part, *, left_s: float) -> Result:
    """Run one part; a failure becomes its result, and a part that does not fit is left out and says so."""
    result = Result(part=chosen.name, shows=chosen.shows)
    if chosen.seconds > left_s:
        result.problem = f"left out: needs about {chosen.seconds:.0f} s, {left_s:.0f} s are left"
        return result
    start = time.perf_counter()
    try:
        for row in chosen.run():
            result.rows.append(row)
    except Exception as err:  # the other parts still run
        traceback.print_exc()
        result.problem = f"{type(err).__name__}: {err}".splitlines()[0]
    result.seconds = time.perf_counter() - start
    return result


def table(results: list[Result]) -> str:
    """Write the results as a Markdown table."""
    lines = ["| part | case | value | unit | goal | met |", "| --- | --- | ---: | --- | --- | --- |"]
    for result in results:
        for row in result.rows:
            met = "" if row.met is None else "yes" if row.met else "NO"
            lines.append(
                f"| {result.part} | {row.case} | {row.value:.4g} | {row.unit} | {row.goal} | {met} |"
            )
        if result.problem:
            lines.append(f"| {result.part} | {result.problem} | | | | NO |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the parts; return 0 when every goal is met, 1 when one is not, 2 without a GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for module in MODULES:
        importlib.import_module(module)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--list", action="store_true", help="name the parts and stop")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    args = parser.parse_args(argv)
    if args.list:
        print("\n".join(f"{p.name:24s} {p.seconds:4.0f} s  {p.shows}" for p in PARTS.values()))
        return 0
    if not torch.cuda.is_available():
        print(
            f"No CUDA device: torch {torch.__version__} sees none, so nothing was measured.", file=sys.stderr
        )
        return 2
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "command": "python -m benchmarks.gpu " + " ".join(argv if argv is not None else sys.argv[1:]),
    }
    start = time.perf_counter()
    results: list[Result] = []
    for name in args.parts:
        results.append(run_part(PARTS[name], left_s=TOTAL_S - (time.perf_counter() - start)))
        print(f"{name}: {results[-1].seconds:.1f} s {results[-1].problem}", flush=True)
        args.json.write_text(
            json.dumps({**about, "parts": [asdict(result) for result in results]}, indent=1) + "\n"
        )
    print(f"\n{about['device']}, torch {about['torch']}, {about['date']}\n\n{table(results)}")
    failed = any(result.problem or any(row.met is False for row in result.rows) for result in results)
    return 1 if failed else 0


if __name__ == "__main__":
    # The parts import this module by its name; run that copy, not the one called __main__.
    sys.exit(importlib.import_module("benchmarks.gpu").main())
