"""The quickstart as a user runs it -> the table that the README shows, with its day and processor.

``python -m benchmarks.quickstart`` trains 100 steps and writes ``benchmarks/quickstart.json``. Then
``python -m benchmarks.figures`` puts the table into the README. On a busy machine it refuses, because the
rates and the measured peak would be wrong, unless ``--loaded`` says that it may.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime

import torch

from benchmarks.__main__ import HERE, others_now, too_busy
from benchmarks.clock import Load
from lightning_thd.report.page import processor


def table_of(output: str) -> str:
    """Cut the table out of what the quickstart printed, up to the line with the measured peak.

    Notes on single steps, which may stand below that line, belong to the run and not to the README.
    """
    found = re.search(r"^ +first +median +last\n(?:.+\n)+?MFU is the share of .*$", output, re.M)
    if found is None:
        raise ValueError(f"The quickstart printed no table with a measured peak:\n{output[-2_000:]}")
    return found[0]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--loaded", action="store_true", help="measure on a busy machine")
    args = parser.parse_args(argv)
    if not args.loaded and (busy := too_busy(others_now())):
        print(busy, file=sys.stderr)
        return 1
    load, begun = Load(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "examples/quickstart.py", "--steps", str(args.steps), "--out", folder]
        # as a user runs it: on all cores, also if the benchmarks around it run on one
        env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        done = subprocess.run(command, cwd=HERE.parent, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(done.stderr[-2_000:], file=sys.stderr)
        return done.returncode
    about = re.search(r"parameters, (\S+), (\S+), (\d+) steps", done.stdout)
    assert about is not None
    kept = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": processor(),
        "torch": torch.__version__.partition("+")[0],
        "precision": about[2],
        "steps": args.steps,
        "minutes": (time.perf_counter() - begun) / 60,
        "others": load.others(),
        "table": table_of(done.stdout),
    }
    (HERE / "quickstart.json").write_text(json.dumps(kept, indent=1) + "\n")
    print(kept["table"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
