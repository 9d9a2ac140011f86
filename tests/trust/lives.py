"""Jobs that start, stop, die and change ranks, workers and capacity in any order -> what was lost or doubled.

``python -m tests.trust.lives [--minutes 10]`` ends in a table of ``benchmarks/TRUST.md``. The machine is
``tests.data.lives.machine``: hypothesis draws data sets (with a length or as streams, one source or a
mixture) and orders of events, and reduces what goes wrong to the shortest order that still does.
"""

from __future__ import annotations

import argparse
import logging
import time

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.data.lives.machine import LivesOfRanks
from tests.trust.record import record

_AT_ONCE = 4  # lives between two looks at the clock


def main() -> None:
    """Run lives until the time is over, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="after which no more lives begin")
    parser.add_argument("--lives", type=int, default=10_000, help="after which the run ends")
    options = parser.parse_args()

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    how = settings(
        max_examples=_AT_ONCE,
        stateful_step_count=25,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )

    stop = time.monotonic() + 60 * options.minutes
    tally = LivesOfRanks.tally
    while time.monotonic() < stop and tally["lives"] < options.lives:
        run_state_machine_as_test(LivesOfRanks, settings=how)

    rows: dict[str, object] = {name: f"{count:,}" for name, count in tally.items()}
    rows["sequences lost or doubled, packs over capacity, steps run otherwise a second time, hangs"] = 0
    record("lives", rows)


if __name__ == "__main__":
    main()
