"""CPU seconds from nothing to a first batch: our import beyond Lightning's, and the quickstart's start.

``python -m benchmarks.import_time`` starts fresh processes, which take turns, and takes the least CPU
seconds of each: ``import lightning``, a floor that is not ours; ``import lightning_thd`` after it; the
quickstart up to its first training step, its data, model and Trainer made; and Lightning and the model's
class alone, the floor of that.
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
import lightning_thd
print(between, time.process_time() - between)
"""
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
GOAL_S, START_S = 0.3, 5.0
# After the first round all modules are compiled, as they are where a package is installed.
COMPILED = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def imports() -> tuple[float, float]:
    """CPU seconds of Lightning's import and of ours after it."""
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True, env=COMPILED
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
    found = [(*imports(), first_batch(), model_import()) for _ in range(args.rounds)]
    lightning, ours, start, floor = (min(column) for column in zip(*found, strict=True))
    print(f"CPU seconds: lightning {lightning:.2f}, lightning_thd {ours:.2f} more (goal <= {GOAL_S})")
    print(f"CPU seconds: quickstart to its first batch {start:.2f} (goal <= {START_S}), imports included")
    print(f"CPU seconds: lightning and the model's class alone {floor:.2f}")
    less("CPU of the import beyond lightning's", ours, "s", GOAL_S, peer=lightning)
    less(
        "CPU of the quickstart to its first batch; importing lightning and the model alone",
        start,
        "s",
        START_S,
        peer=floor,
    )


if __name__ == "__main__":
    main()
