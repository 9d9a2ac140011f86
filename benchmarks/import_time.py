"""Seconds of ``import lightning_thd`` beyond ``import lightning``, best of five fresh processes.

python -m benchmarks.import_time
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.results import less

_CODE = """
import time
begin = time.perf_counter()
import lightning
between = time.perf_counter()
import lightning_thd
print(between - begin, time.perf_counter() - between)
"""
GOAL_S = 0.3


def main(argv: list[str] | None = None) -> None:
    runs = [
        subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=True)
        for _ in range(5)
    ]
    seconds = [[float(x) for x in done.stdout.split()] for done in runs]
    lightning, ours = (min(column) for column in zip(*seconds, strict=True))
    print(f"lightning {lightning:.2f} s, lightning_thd {ours:.2f} s more (goal <= {GOAL_S} s)")
    less("import beyond lightning's", ours, "s", GOAL_S, peer=lightning)


if __name__ == "__main__":
    main()
