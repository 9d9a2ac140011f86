"""What a reader meets beside the subject: other people's private names, hidden states, variants.

``python -m benchmarks.house`` prints these counts of this checkout, each defined by a function of
``house_text.py``, which reads the code, or of ``house_run.py``, which runs it:

- attributes of other packages that the import changes, and those more that building and training change;
- private names of other packages, distinct and by use, those used at import, aten operators apart;
- functions that decide by reading source, bytecode, an AST, a stack or autograd's graph;
- ambient states: values of modules and classes that functions change;
- questions which variant a batch, plan or step is; files that know shared prefixes, or shards;
- calls and files of this package in a plain training step of a one-layer model on one CPU.

``--at`` takes the path of a checkout, or a commit of this repository; several stand side by side, and
"met" speaks of the last.
``--list`` names every place, ``--calls`` the calls of a step by file. Nothing here counts lines.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import house_text as text
from benchmarks.house_run import FIRST_STEP, LAST_STEP
from benchmarks.results import less

ROOT = Path(__file__).parent.parent
# What this script counts at commit d5ed5429, 2026-11-28: goals are shares of it. The files that know prefixes
# and shards were 25 and 25 while it counted the option ``share_prefixes``, the names that a folder offers,
# and shards of weights.
BEFORE = {
    "private names of others": 142,
    "ambient states": 25,
    "questions which variant it is": 54,
    "files that know shared prefixes": 23,
    "files that know shards": 23,
    "calls of a plain step": 195,
    "files of a plain step": 29,
}
GOALS = {
    # The one door: the method in which transformers chooses a model's attention.
    "attributes of others changed by import": 1,
    "attributes of others changed by building and training": 0,
    "private names of others": BEFORE["private names of others"] * 2 // 5,
    "places that use private names at import": 0,
    "functions that decide by source, bytecode, AST or stack": 0,
    "ambient states": BEFORE["ambient states"] // 4,
    "questions which variant it is": BEFORE["questions which variant it is"] // 4,
    "files that know shared prefixes": BEFORE["files that know shared prefixes"] // 3,
    "files that know shards": BEFORE["files that know shards"] // 3,
    "calls of a plain step": BEFORE["calls of a plain step"],
    "files of a plain step": BEFORE["files of a plain step"],
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """The counts of one checkout: each number, the places behind it, and the calls of a step."""

    numbers: dict[str, int]
    places: dict[str, list[str]]
    calls: list[tuple[str, str, int]]


def run_in(checkout: Path, count: str) -> Any:
    """Run one count of ``house_run.py`` in a process that imports the package from a checkout."""
    # -P keeps the folder of the script off the path: its files have names such as loss.py.
    done = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).with_name("house_run.py")), count],
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"Counting the {count} of {checkout} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def count(checkout: Path) -> Counts:
    """Count everything in a checkout."""
    files = text.read_package(checkout)
    inherited = {file: set(names) for file, names in run_in(checkout, "inherited").items()}
    private, at_import, operators = text.foreign_names(files, inherited)
    changes = run_in(checkout, "changes")
    calls = [tuple(call) for call in run_in(checkout, "calls")]
    places: dict[str, list[Any]] = {
        "attributes of others changed by import": changes["by import"],
        "attributes of others changed by building and training": changes["by building and training"],
        "uses of private names of others": private,
        "places that use private names at import": at_import,
        "uses of private aten operators": operators,
        "functions that decide by source, bytecode, AST or stack": text.readers_of_code(files),
        "ambient states": text.ambient_states(files),
        "questions which variant it is": text.questions_of_variants(files),
        "files that know shared prefixes": text.files_that_know(files, text.is_of_prefixes),
        "files that know shards": text.files_that_know(files, text.is_of_shards),
    }
    steps = LAST_STEP - FIRST_STEP
    numbers = {
        "private names of others": len({place.name for place in private}),
        **{what: len(where) for what, where in places.items()},
        "calls of a plain step": round(sum(number for *_, number in calls) / steps),
        "files of a plain step": len({file for file, *_ in calls}),
    }
    return Counts(
        numbers=numbers,
        places={what: [str(place) for place in where] for what, where in places.items()},
        calls=calls,
    )


@contextmanager
def checkout_of(at: str) -> Iterator[Path]:
    """Give the folder of a checkout: a path as it is, a commit written into a temporary folder."""
    if Path(at).is_dir():
        yield Path(at).resolve()
        return
    archive = subprocess.run(["git", "archive", at], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        raise SystemExit(f"--at {at} is no folder, and git says: {archive.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        yield Path(folder)


def verdict(what: str, number: int) -> tuple[str, str]:
    """Return the goal of a count, and "yes" or "NO" as the other benchmarks' tables say it; or nothing."""
    if what not in GOALS:
        return "", ""
    return f"<= {GOALS[what]}", "yes" if number <= GOALS[what] else "NO"


def print_calls(counts: Counts) -> None:
    """Print the calls of a step by file."""
    steps = LAST_STEP - FIRST_STEP
    for file in sorted({file for file, *_ in counts.calls}):
        here = [(name, number / steps) for other, name, number in counts.calls if other == file]
        names = ", ".join(f"{name} {number:.1f}" for name, number in here)
        print(f"{sum(number for _, number in here):7.1f} {file}: {names}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--at", action="append", metavar="CHECKOUT", help="a path or a commit; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="name every place that is counted")
    parser.add_argument("--calls", action="store_true", help="list the calls of a step by file")
    args = parser.parse_args(argv)
    columns = args.at or [str(ROOT)]
    counts = []
    for at in columns:
        with checkout_of(at) as checkout:
            counts.append(count(checkout))
    width = max(map(len, counts[0].numbers))
    print(" " * width, *(f"{at[-16:]:>16}" for at in columns), f"{'goal':>8} {'met':>4}")
    for what in counts[0].numbers:
        goal, met = verdict(what, counts[-1].numbers[what])
        print(f"{what:{width}}", *(f"{each.numbers[what]:16,}" for each in counts), f"{goal:>8} {met:>4}")
        if args.list:
            for place in counts[-1].places.get(what, []):
                print(f"    {place}")
    if args.calls:
        print_calls(counts[-1])
    for what, number in counts[-1].numbers.items():
        if what in GOALS:
            less(what, number, "", GOALS[what])


if __name__ == "__main__":
    main()
