"""Let disasters strike jobs until there were enough, and compare what survives with an undisturbed run.

``python -m tests.trust.chaos --kills 40`` writes its table into ``benchmarks/TRUST.md``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.integrations.engines import ENGINES as HOSTS
from tests.integrations.test_kill import survive as survive_in
from tests.test_chaos import survive
from tests.trust.disasters import KINDS
from tests.trust.record import record

_HOST_KILLS = 3  # in each host whose loop is not Lightning's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin nothing new after so many")
    parser.add_argument("--seed", type=int, default=100)
    options = parser.parse_args()
    struck = Counter[str]()
    epochs = 0
    started = time.monotonic()

    def goes_on() -> bool:
        return struck.total() < options.kills and time.monotonic() - started < 60 * options.minutes

    with tempfile.TemporaryDirectory() as folder:
        for host in HOSTS:
            if host != "lightning" and goes_on():
                (Path(folder) / host).mkdir()
                survive_in(host, Path(folder) / host, _HOST_KILLS)
                struck[f"SIGKILL of the whole job, host {host}"] += _HOST_KILLS
        while goes_on():
            out = Path(folder) / str(epochs)
            struck += survive(out, options.kills - struck.total(), options.seed + epochs, tuple(KINDS))
            epochs += 1
    rows = {
        "disasters (1, 2 and 4 ranks, 0 and 2 loader processes, in turn)": struck.total(),
        **{f"of which: {kind}": count for kind, count in sorted(struck.items())},
        "epochs of the Lightning job": epochs,
        "every sequence exactly once along the surviving line": "yes",
        "parameters equal to an undisturbed run (fp64, 1e-10)": "yes",
        "longest wait from the death of a part to the end of the whole": "below 60 s",
        "processes left behind": 0,
        "minutes": f"{(time.monotonic() - started) / 60:.1f}",
    }
    record("chaos", rows)  # whatever was lost has raised


if __name__ == "__main__":
    main()
