"""CPU seconds from nothing to a first batch: our import beyond Lightning's, and the quickstart's start.

``python -m benchmarks.import_time`` starts fresh processes, which take turns, and takes the least CPU
seconds of each: ``import lightning``, a floor that is not ours; after it the monitor, or all names of
``lightning_thd``; the quickstart up to its first training step, its data, model and Trainer made; and
Lightning and the model's class alone, the floor of that.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.results import less

_IMPORT = """
import time
import lightning
between = time.process_time()
from lightning_thd import {names}
print(between, time.process_time() - between)
"""
# What a user takes from the package -> our goal in CPU seconds beyond Lightning's import. The registries of
# transformers are filled when a batch is taken. Its modeling utilities take 0.7 s if they are imported then.
TAKEN = {
    "the monitor": ("THDThroughputMonitor", 0.2),
    "everything, with the registries of transformers": ("*", 1.0),
}
_FLOOR = """
import time
import lightning
import transformers.models.qwen3.modeling_qwen3
print(time.process_time())
"""
_START = """
import os, sys, time
sys.path.insert(0, {examples!r})
import quickstart
def first(self, batch, batch_idx):
    print(chr(10) + "first batch", time.process_time(), flush=True)
    os._exit(0)
quickstart.TinyQwen3.training_step = first
sys.argv[1:] = ["--steps", "1", "--out", {out!r}]
quickstart.main()
"""
EXAMPLES = Path(__file__).parent.parent / "examples"
START_S = 5.0
# After the first round all modules are compiled, as they are where a package is installed.
COMPILED = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def imports(names: str) -> tuple[float, float]:
    """CPU seconds of Lightning's import and of ours after it, for the names that are taken."""
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT.format(names=names)],
        capture_output=True,
        text=True,
        check=True,
        env=COMPILED,
    )
    lightning, ours = map(float, done.stdout.split())
    return lightning, ours


def model_import() -> float:
    """CPU seconds of Lightning and the quickstart's model class, imported without us."""
    done = subprocess.run(
        [sys.executable, "-c", _FLOOR], capture_output=True, text=True, check=True, env=COMPILED
    )
    return float(done.stdout)


def first_batch() -> float:
    """CPU seconds of the quickstart until its first batch reaches the model."""
    with tempfile.TemporaryDirectory() as out:
        code = _START.format(examples=str(EXAMPLES), out=out)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=COMPILED
        )
    return float(done.stdout.splitlines()[-1].split()[-1])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args(argv)
    floors: list[float] = []
    ours: dict[str, list[float]] = {what: [] for what in TAKEN}
    starts = []
    for _ in range(args.rounds):
        for what, (names, _goal) in TAKEN.items():
            lightning_s, ours_s = imports(names)
            floors.append(lightning_s)
            ours[what].append(ours_s)
        starts.append((first_batch(), model_import()))
    start, floor = (min(column) for column in zip(*starts, strict=True))
    lightning = min(floors)
    for what, (_names, goal) in TAKEN.items():
        seconds = min(ours[what])
        print(f"CPU seconds: lightning {lightning:.2f}, {what} {seconds:.2f} more (goal <= {goal})")
        less(f"CPU of an import beyond lightning's: {what}", seconds, "s", goal, peer=lightning)
    print(f"CPU seconds: quickstart to its first batch {start:.2f} (goal <= {START_S}), imports included")
    print(f"CPU seconds: lightning and the model's class alone {floor:.2f}")
    less(
        "CPU of the quickstart to its first batch; importing lightning and the model alone",
        start,
        "s",
        START_S,
        peer=floor,
    )


if __name__ == "__main__":
    main()
