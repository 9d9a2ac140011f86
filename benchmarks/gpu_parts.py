"""What a run on a GPU consists of: parts, each a test folder or a function that yields rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.oracles import FOLDER

MODULES = (
    *("benchmarks.gpu_tests", "benchmarks.gpu_attention", "benchmarks.gpu_cuda_graph"),
    *("benchmarks.gpu_lightning", "benchmarks.gpu_end_to_end", "benchmarks.gpu_loss", "benchmarks.gpu_fp8"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One finding.

    Attributes:
        case: what was measured or compared.
        value: the number.
        unit: its unit.
        goal: what was wanted, as text, or "" for information.
        met: whether the goal is met; None where there is none.
    """

    case: str
    value: float
    unit: str
    goal: str = ""
    met: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A registered part.

    Attributes:
        name: unique.
        shows: one line for the table.
        seconds: how long it takes on a current GPU.
        rank: parts of a lower one run first: the most telling.
        run: yields rows; None for a part that pytest runs.
        tests: paths that pytest runs with ``-m gpu``.
    """

    name: str
    shows: str
    seconds: float
    rank: int
    run: Callable[[], Iterator[Row]] | None = None
    tests: tuple[str, ...] = field(default=())


PARTS: dict[str, Part] = {}
# What ``benchmarks.gpu_oracles`` computed before, on a machine without a GPU.
ORACLES = Path("runs/oracles")


def take_oracles_along() -> None:
    """Let this process and its children read the oracles of ``ORACLES``, and keep new ones there."""
    os.environ.setdefault(FOLDER, str(ORACLES.absolute()))


def add(new: Part) -> None:
    """Register a part.

    Raises:
        ValueError: for a name that is taken.
    """
    if new.name in PARTS:
        raise ValueError(f"Part {new.name!r} is registered twice; give the second another name.")
    PARTS[new.name] = new


def part(
    name: str, *, shows: str, seconds: float, rank: int
) -> Callable[[Callable[[], Iterator[Row]]], Callable[[], Iterator[Row]]]:
    """Register a function that yields rows as a part; see :class:`Part` for the arguments."""

    def register(run: Callable[[], Iterator[Row]]) -> Callable[[], Iterator[Row]]:
        add(Part(name=name, shows=shows, seconds=seconds, rank=rank, run=run))
        return run

    return register


def in_order() -> list[Part]:
    """List the parts, the most telling first."""
    return sorted(PARTS.values(), key=lambda x: x.rank)


def median_us(run: Callable[[], object], *, repeats: int = 20) -> float:
    """Median time of a call on the GPU, by events, after three calls to warm up; in microseconds."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return sorted(times)[len(times) // 2]
