"""One command for a machine with a GPU: tests and benchmarks, part by part, the most telling first.

``python -m benchmarks.gpu --plan`` says what would run, in which order and what of it fits ``--budget``
minutes; without ``--plan`` it runs. Every part runs in a process of its own, with a time-out, and writes its
findings into a file of its own in ``--out`` as they come: an error that leaves the device unusable ends one
part only. Run again, it goes on with the parts that have not finished on this device and torch. At the end
stand a table, and the rows of the README's table of kernels that have been proved. No network is needed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_parts
from benchmarks.gpu_doubts import listed
from benchmarks.gpu_parts import Part, Row, in_order

# A part may take so many times what is expected of it, and so long at least (its process starts cold).
PATIENCE, LEAST_S = 3.0, 60.0
# What a CUDA device says when no further call of the process can succeed.
STICKY = ("device-side assert", "illegal memory access", "unspecified launch failure", "CUDA error")
UNFINISHED = ("", "left out", "interrupted")


def about(device: str) -> dict[str, Any]:
    """Say what the findings are of: a part counts as done on the same device and torch only."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"none ({device})"
    return {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda}


def plan(chosen: list[Part], *, budget_s: float, done: set[str]) -> list[tuple[Part, str]]:
    """Give every part what will happen to it: "run", "done", or "left out: ..."."""
    left, planned = budget_s, []
    for one in chosen:
        fate = "run"
        if one.name in done:
            fate = "done"
        elif one.seconds > left:
            fate = f"left out: takes about {one.seconds:.0f} s, and {left:.0f} s are left"
        else:
            left -= one.seconds
        planned.append((one, fate))
    return planned


def plan_table(planned: list[tuple[Part, str]], *, budget_s: float) -> str:
    """Write the plan, one line a part."""
    lines = [f"{'part':<18}{'about':>7}   what happens"]
    for one, fate in planned:
        lines.append(f"{one.name:<18}{one.seconds:>5.0f} s   {fate}: {one.shows}")
    total = sum(one.seconds for one, fate in planned if fate == "run")
    lines.append(f"{total:.0f} s of parts to run in a budget of {budget_s:.0f} s.")
    return "\n".join(lines)


def saved(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the findings that are there, by part."""
    found = {}
    for file in sorted(folder.glob("*.json")):
        kept = json.loads(file.read_text())
        found[kept["part"]] = kept
    return found


def finished(folder: Path, of: dict[str, Any]) -> set[str]:
    """Name the parts that ran to their end on this device and torch."""
    return {name for name, kept in saved(folder).items() if kept["finished"] and kept["about"] == of}


def run_part(one: Part, folder: Path, *, modules: list[str], device: str, limit_s: float) -> dict[str, Any]:
    """Run a part in a process of its own and keep what it found, however the process ends.

    Returns:
        What was written: rows, the first line of a problem, seconds, and whether it ran to its end.
    """
    rows_file = folder / f"{one.name}.rows"
    rows_file.unlink(missing_ok=True)
    if one.run is None:
        command = [sys.executable, "-u", "-m", "pytest", "-p", "tests.gpu.at_once", "-m", "gpu", "-q", "-rfE"]
        command += ["--tb=no", "--no-header", *one.tests]
    else:
        command = [
            sys.executable,
            "-u",
            "-m",
            "benchmarks.gpu",
            "--rows",
            str(rows_file),
            "--parts",
            one.name,
        ]
        command += ["--modules", *modules]
    start = time.perf_counter()
    code, output = _start(command, limit_s)
    if one.run is None and code != 0 and any(x in output for x in STICKY):
        again = limit_s - (time.perf_counter() - start)
        if again > LEAST_S / 2:  # once more, so that the error is reported where it happens
            _, second = _start([*command, "-x"], again, CUDA_LAUNCH_BLOCKING="1")
            output += f"\n--- again with CUDA_LAUNCH_BLOCKING=1 ---\n{second}"
    lines = rows_file.read_text().splitlines() if rows_file.exists() else []
    kept = {
        "part": one.name,
        "shows": one.shows,
        "about": about(device),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(command[1:]),
        "seconds": round(time.perf_counter() - start, 1),
        "rows": [json.loads(line) for line in lines],
        "problem": "" if code in (0, _NO_TESTS) else _problem(code, output, limit_s),
        "finished": code in (0, 1, _NO_TESTS) and not any(x in output for x in STICKY),
        "output": output[-20_000:],
    }
    if one.run is None and code in (0, 1):
        kept["rows"] += [asdict(row) for row in _test_rows(output)]
    (folder / f"{one.name}.json").write_text(json.dumps(kept, indent=1) + "\n")
    rows_file.unlink(missing_ok=True)
    return kept


_NO_TESTS = 5  # pytest's code for a folder without tests of that mark


def _start(command: list[str], limit_s: float, **environment: str) -> tuple[int | None, str]:
    """Run a process and give its exit code, None where it ran past the limit, and what it said."""
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS wants it to be deterministic
    caches = Path("runs").absolute()  # kept, so that a second run compiles nothing
    kept = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
    given = {**kept, **os.environ, "CUBLAS_WORKSPACE_CONFIG": workspace, **environment}
    with subprocess.Popen(  # our own interpreter and arguments
        command,
        env=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=Path(__file__).resolve().parents[1],
    ) as process:
        said: list[str] = []
        reader = threading.Thread(target=_echo, args=(process, said), daemon=True)
        reader.start()
        try:
            code: int | None = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            code = None
        reader.join(timeout=5.0)
    return code, "".join(said)


def _echo(process: subprocess.Popen[str], said: list[str]) -> None:
    """Print what a process says as it comes, and keep it."""
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        print(line, end="", flush=True)


def _problem(code: int | None, output: str, limit_s: float) -> str:
    if code is None:
        return f"ran past {limit_s:.0f} s"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [x for x in lines if x.startswith(("FAILED", "ERROR", "E  ")) or "Error" in x]
    first = (telling or lines or ["no output"])[0 if telling else -1]
    return f"exit code {code}: {first}"[:300]


def _test_rows(output: str) -> list[Row]:
    """Count what pytest says in its last line."""
    counts = {"passed": 0, "failed": 0, "skipped": 0, "errors": 0}
    for word in (output.strip().splitlines() or [""])[-1].replace(",", "").split(" in ")[0].split():
        if word.isdigit():
            number = int(word)
        else:
            key = "errors" if word == "error" else word
            if key in counts:
                counts[key] = number
    bad = counts["failed"] + counts["errors"]
    passed = Row(case="tests passed", value=counts["passed"], unit="tests")
    failed = Row(case="tests failed", value=bad, unit="tests", goal="0", met=bad == 0)
    return [passed, failed, Row(case="tests skipped", value=counts["skipped"], unit="tests")]


def table(found: dict[str, dict[str, Any]]) -> str:
    """Write the findings as a Markdown table."""
    lines = ["| part | case | value | unit | goal | met |", "| --- | --- | ---: | --- | --- | --- |"]
    for name, kept in found.items():
        for row in kept["rows"]:
            met = "" if row["met"] is None else "yes" if row["met"] else "NO"
            cells = (name, row["case"], f"{row['value']:.4g}", row["unit"], row["goal"], met)
            lines.append("| " + " | ".join(cells) + " |")
        if kept["problem"]:
            lines.append(f"| {name} | {kept['problem']} | | | | NO |")
    return "\n".join(lines)


def proved_rows(found: dict[str, dict[str, Any]]) -> list[str]:
    """List the rows of the table of kernels that every comparison of this run agrees with."""
    from lightning_thd.attention.support import SUPPORT, support_table

    rows = [row for row in found.get("attention_equal", {"rows": []})["rows"] if row["met"] is not None]
    by_kernel: dict[str, list[bool]] = {}
    for row in rows:
        by_kernel.setdefault(row["case"].partition(",")[0], []).append(row["met"])
    lines = support_table().splitlines()[2:]
    return [
        f"{line} proved by {len(by_kernel[kernel])} comparisons"
        for kernel, line in zip(SUPPORT, lines, strict=True)
        if all(by_kernel.get(kernel, [False]))
    ]


def _write_rows(name: str, file: Path) -> None:
    """Run a part in this process and write every row as it comes."""
    one = gpu_parts.PARTS[name]
    assert one.run is not None
    with file.open("w") as out:
        for row in one.run():
            out.write(json.dumps(asdict(row)) + "\n")
            out.flush()
            print(f"{name}: {row.case}: {row.value:.4g} {row.unit} {row.goal}".rstrip(), flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the parts; return 0 when every goal is met, 1 when one is not, 2 without a GPU."""
    args = _arguments(argv)
    for module in args.modules:
        importlib.import_module(module)
    unknown = [name for name in args.parts or () if name not in gpu_parts.PARTS]
    if unknown:
        print(f"No part {unknown[0]!r}. Parts: {', '.join(gpu_parts.PARTS)}.", file=sys.stderr)
        return 2
    if args.rows is not None:
        _write_rows(args.parts[0], args.rows)
        return 0
    chosen = [one for one in in_order() if not args.parts or one.name in args.parts]
    budget_s, of = args.budget * 60.0, about(args.device)
    done = set() if args.again else finished(args.out, of)
    planned = plan(chosen, budget_s=budget_s, done=done)
    can_run = args.device == "any" or torch.cuda.is_available()
    if args.plan or not can_run:
        print(plan_table(planned, budget_s=budget_s))
    if not can_run:
        print(f"No CUDA device: torch {torch.__version__} sees none, so nothing is run.", file=sys.stderr)
        if not args.plan:
            return 2
    if args.plan:
        print(f"\nDoubts that only a GPU settles:\n{listed()}")
        return 0
    return _run_all(planned, args, budget_s=budget_s, of=of)


def _run_all(
    planned: list[tuple[Part, str]], args: argparse.Namespace, *, budget_s: float, of: dict[str, Any]
) -> int:
    args.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    for one, fate in planned:
        left = budget_s - (time.perf_counter() - start)
        if fate != "run" or left < one.seconds:
            late = fate if fate != "run" else f"left out: {left:.0f} s are left"
            print(f"{one.name}: {late}", flush=True)
            continue
        limit_s = min(max(PATIENCE * one.seconds, LEAST_S), left)
        kept = run_part(one, args.out, modules=args.modules, device=args.device, limit_s=limit_s)
        print(f"{one.name}: {kept['seconds']:.0f} s {kept['problem']}", flush=True)
    names = {one.name for one, _ in planned}
    found = {name: kept for name, kept in saved(args.out).items() if name in names and kept["about"] == of}
    print(f"\n{of['device']}, torch {of['torch']}\n\n{table(found)}")
    proved = proved_rows(found)
    if proved:
        print("\nRows of the README's table of kernels that this run proved:\n" + "\n".join(proved))
    missed = [x for kept in found.values() for x in kept["rows"] if x["met"] is False]
    return 1 if missed or any(kept["problem"] for kept in found.values()) else 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--plan", action="store_true", help="say what would run, and run nothing")
    parser.add_argument("--budget", type=float, default=9.0, metavar="MIN", help="minutes (9)")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--again", action="store_true", help="run finished parts, too")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the findings")
    parser.add_argument("--device", choices=("cuda", "any"), default="cuda", help="any: parts need no GPU")
    parser.add_argument("--modules", nargs="+", default=list(gpu_parts.MODULES), help="that register parts")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # in the process of a part
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
