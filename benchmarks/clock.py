"""Ways of doing one thing, run in turn -> wall and CPU seconds of each; and how busy others keep the machine.

Load cannot fool what is compared here: ways take turns inside every round, so a neighbour's burst of work
hits all of them; a ratio is the median of the rounds' own ratios; CPU seconds stand beside wall seconds.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of the rounds of one way, wall and CPU (all threads and finished children)."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        """Median of the wall seconds."""
        return median(self.wall)

    @property
    def cpu_s(self) -> float:
        """Median of the CPU seconds."""
        return median(self.cpu)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles of the wall seconds, as a share of their median."""
        low, high = np.percentile(self.wall, [25, 75])
        return float(high - low) / 2 / self.wall_s if self.wall_s else 0.0

    def times(self, other: Times) -> float:
        """Return how many times the wall seconds of this way another takes: the median over rounds."""
        return median(b / a for a, b in zip(self.wall, other.wall, strict=False))


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def take_turns(
    ways: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warm_up: int = 1,
    most: Mapping[str, int] | None = None,
) -> dict[str, Times]:
    """Run every way once a round and keep its seconds.

    Args:
        ways: what is run, by name; the first is ours.
        rounds: that count.
        warm_up: rounds before them.
        most: rounds that count of single ways, where those take long.

    Returns:
        The seconds by name.
    """
    found = {name: Times() for name in ways}
    for turn in range(-warm_up, rounds):
        for name, way in ways.items():
            if turn >= (most or {}).get(name, rounds):
                continue
            wall, cpu = time.perf_counter(), cpu_seconds()
            way()
            if turn >= 0:
                found[name].wall.append(time.perf_counter() - wall)
                found[name].cpu.append(cpu_seconds() - cpu)
    return found


class Load:
    """Cores that others keep busy while this process and its children work.

    Read from /proc/stat, which counts all that runs on the machine; where there is none (macOS) nothing is
    known, and ``others`` is NaN.
    """

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._before = self._now()

    def others(self) -> float:
        """Cores busy with others' work since the start, on average; children must have ended."""
        wall, busy, own = (b - a for a, b in zip(self._before, self._now(), strict=True))
        found = (busy - own) / wall if wall else 0.0
        return 0.0 if found < 0 else found  # NaN stays

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), self._busy(), cpu_seconds()

    def _busy(self) -> float:
        """Seconds all cores have worked since boot; time that a hypervisor gave to others counts."""
        if not self._stat.exists():
            return float("nan")
        # user nice system idle iowait irq softirq steal, in hundredths of a second
        ticks = [int(x) for x in self._stat.read_text().splitlines()[0].split()[1:9]]
        return (sum(ticks) - ticks[3] - ticks[4]) / 100
