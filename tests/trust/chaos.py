"""Kill jobs with SIGKILL until a number of kills is reached, and compare what survives with an undisturbed
run.

``python -m tests.trust.chaos --kills 40`` writes its table into ``benchmarks/TRUST.md``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from tests.test_chaos import survive
from tests.trust.record import record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after so many all the same")
    parser.add_argument("--seed", type=int, default=100)
    given = parser.parse_args()
    done = epochs = 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        while done < given.kills and time.monotonic() - started < 60 * given.minutes:
            out = Path(folder) / str(epochs)
            done += survive(out, kills=given.kills - done, seed=given.seed + epochs)
            epochs += 1
    rows = {
        "kills (SIGKILL of the whole job; 1, 2 and 4 ranks in turn, workers 0 and 2)": done,
        "epochs": epochs,
        "every sequence exactly once along the surviving line": "yes",
        "parameters equal to an undisturbed run (fp64, 1e-10)": "yes",
        "minutes": f"{(time.monotonic() - started) / 60:.1f}",
    }
    record("chaos", rows)  # survive() has raised where anything was lost


if __name__ == "__main__":
    main()
