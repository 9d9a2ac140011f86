"""One command for a machine with a GPU: tests and benchmarks, part by part, the most telling first.

``python -m benchmarks.gpu --plan`` says what would run, in which order and what of it fits ``--budget``
minutes; without ``--plan`` it runs. Benchmarks share a process and its imports until one of them fails or
runs past its time-out; tests have a process each. So an error that leaves the device unusable ends one part
only. Each part writes its findings into a file of its own in ``--out`` as they come. Run again, the command
goes on with the parts that have not finished on this device and torch. At the end stand a table, and the rows
of the README's table of kernels that have been proved. No network is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_parts
from benchmarks.gpu_doubts import listed
from benchmarks.gpu_parts import Part, Row, in_order, take_oracles_along

# A part may take so many times what is expected of it, and so long at least (its process starts cold).
PATIENCE = 3.0
LEAST_S = 60.0
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


class Process:
    """A process of this interpreter, whose output is printed as it comes and kept.

    Args:
        words: arguments of the interpreter.
        environment: further variables.
    """

    def __init__(self, words: list[str], **environment: str) -> None:
        workspace = os.environ.get(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # cuBLAS wants it to be deterministic
        caches = Path("runs").absolute()  # kept, so that a second run compiles nothing
        kept = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
        given = {**kept, **os.environ, "CUBLAS_WORKSPACE_CONFIG": workspace, **environment}
        self._process = subprocess.Popen(
            [sys.executable, *words],
            env=given,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=Path(__file__).resolve().parents[1],
        )
        self._lines: list[str] = []
        self._part_ended = threading.Event()
        self._reader = threading.Thread(target=self._echo, daemon=True)
        self._reader.start()

    def ask(self, *words: str) -> None:
        """Send a line to the process; one that has ended does not get it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()

    def wait(self, limit_s: float) -> tuple[int | None, str]:
        """Wait until a part or the process ends, and kill the process at the limit.

        Returns:
            The exit code, 0 where a part ended and the process waits for another, None past the limit; and
            what the process said meanwhile.
        """
        until = time.monotonic() + limit_s
        code: int | None = None
        while time.monotonic() < until and code is None:
            if self._part_ended.wait(timeout=0.1):
                code = 0
            else:
                code = self._process.poll()
        if code is None:
            self._process.kill()
        if not self._part_ended.is_set():
            self._reader.join(timeout=5.0)  # what the process started may keep the pipe open
        self._part_ended.clear()

        said = "".join(self._lines)
        self._lines.clear()
        return code, said

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=5.0)
        if not self._reader.is_alive():
            assert self._process.stdout is not None
            self._process.stdout.close()

    def _echo(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == _PART_ENDED:
                self._part_ended.set()
            else:
                self._lines.append(line)
                print(line, end="", flush=True)


class Benchmarks:
    """Runs benchmark parts one after the other in a process, so that they share its imports.

    The process ends with a part that fails or runs past its limit, and the next part gets another one.
    """

    def __init__(self, modules: list[str]) -> None:
        self._words = ["-u", "-m", "benchmarks.gpu", "--serve", "--modules", *modules]
        self._process: Process | None = None

    def run(self, name: str, rows_file: Path, limit_s: float) -> tuple[int | None, str]:
        """Run a part, which writes its rows into a file; see ``Process.wait``."""
        if self._process is None:
            self._process = Process(self._words)
        self._process.ask(name, str(rows_file.absolute()))
        code, said = self._process.wait(limit_s)
        if code != 0 or any(x in said for x in STICKY):
            self.close()
        return code, said

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.close()
            self._process = None


def run_part(
    one: Part, folder: Path, *, benchmarks: Benchmarks, device: str, limit_s: float
) -> dict[str, Any]:
    """Run a part and keep what it found, however its process ends.

    Returns:
        What was written: rows, the first line of a problem, seconds, and whether it ran to its end.
    """
    rows_file = folder / f"{one.name}.rows"
    rows_file.unlink(missing_ok=True)
    start = time.perf_counter()
    if one.run is None:
        benchmarks.close()  # tests have the GPU's memory for themselves
        words = ["-u", "-m", "pytest", "-p", "tests.gpu.at_once", "-m", "gpu", "-q", "-rfE"]
        words += ["--tb=no", "--no-header", *one.tests]
        code, output = run_tests(words, limit_s)
    else:
        words = ["-m", "benchmarks.gpu", "--again", "--parts", one.name]
        code, output = benchmarks.run(one.name, rows_file, limit_s)

    lines = rows_file.read_text().splitlines() if rows_file.exists() else []
    kept = {
        "part": one.name,
        "shows": one.shows,
        "about": about(device),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(words),
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


def run_tests(words: list[str], limit_s: float) -> tuple[int | None, str]:
    """Run pytest. If the device was lost, run it once more, so that the error shows where it happens."""
    until = time.monotonic() + limit_s
    tests = Process(words)
    code, output = tests.wait(limit_s)
    tests.close()
    left = until - time.monotonic()
    if code != 0 and any(x in output for x in STICKY) and left > LEAST_S / 2:
        again = Process([*words, "-x"], CUDA_LAUNCH_BLOCKING="1")
        _, second = again.wait(left)
        again.close()
        output += f"\n--- again with CUDA_LAUNCH_BLOCKING=1 ---\n{second}"
    return code, output


_NO_TESTS = 5  # pytest's code for a folder without tests of that mark
_PART_ENDED = "--- part ended ---"


def serve(run: Callable[[str, Path], None]) -> None:
    """Run the parts whose names come on the standard input, and say when each has ended."""
    for line in sys.stdin:
        name, rows_file = json.loads(line)
        run(name, Path(rows_file))
        gc.collect()  # the part's models
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        torch.cuda.empty_cache()
        print(_PART_ENDED, flush=True)


def _problem(code: int | None, output: str, limit_s: float) -> str:
    if code is None:
        return f"ran past {limit_s:.0f} s"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [x for x in lines if re.match(r"FAILED|ERROR|E  |[\w.]*(Error|Exception)\b", x)]
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
    take_oracles_along()
    for module in args.modules:
        importlib.import_module(module)
    unknown = [name for name in args.parts or () if name not in gpu_parts.PARTS]
    if unknown:
        print(f"No part {unknown[0]!r}. Parts: {', '.join(gpu_parts.PARTS)}.", file=sys.stderr)
        return 2
    if args.serve:
        serve(_write_rows)
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
    with contextlib.closing(Benchmarks(args.modules)) as benchmarks:
        for one, fate in planned:
            left = budget_s - (time.perf_counter() - start)
            if fate != "run" or left < one.seconds:
                late = fate if fate != "run" else f"left out: {left:.0f} s are left"
                print(f"{one.name}: {late}", flush=True)
                continue
            limit_s = min(max(PATIENCE * one.seconds, LEAST_S), left)
            kept = run_part(one, args.out, benchmarks=benchmarks, device=args.device, limit_s=limit_s)
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
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)  # in the process of parts
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
