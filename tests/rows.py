"""Run many cells on one start of ranks: each has a time-out of its own, and none ends those after it."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ranks import on_cpu, started


@dataclass(frozen=True)
class Outcome:
    """What one rank made of a cell: a value, or an error's type and message, or nothing in time."""

    value: Any = None
    error: str | None = None


def error_or(outcome: Outcome, compare: Callable[[Any], Any]) -> Any:
    """Return what a comparison makes of a rank's value, or the error the rank or the comparison raised."""
    if outcome.error is not None:
        return outcome.error
    try:
        return compare(outcome.value)
    except AssertionError as err:
        return f"AssertionError: {err}"


def run_row(
    fn: Callable[..., Any], world_size: int, cells: Sequence[Any], *args: object, cell_timeout_s: float = 90.0
) -> list[list[Outcome]]:
    """Run ``fn(cell, *args)`` for every cell in turn on the same gloo ranks.

    A cell that raises gives its error; one that hangs, or that a rank dies in, is given up after its time,
    and the cells after it run on ranks started anew.
    """
    outcomes: list[list[Outcome]] = []
    while len(outcomes) < len(cells):
        outcomes += _start(fn, world_size, list(cells[len(outcomes) :]), args, cell_timeout_s)
    return outcomes


def _start(
    fn: Callable[..., Any], world_size: int, cells: list[Any], args: tuple[object, ...], timeout_s: float
) -> list[list[Outcome]]:
    with tempfile.TemporaryDirectory() as folder:
        turns = (fn, cells, args, folder, timeout_s)
        with started(_turns, world_size, turns, folder) as (ranks, _):
            return _collect(ranks, Path(folder), len(cells), timeout_s)


def _collect(ranks: list[Any], folder: Path, count: int, timeout_s: float) -> list[list[Outcome]]:
    outcomes: list[list[Outcome]] = []
    deadline = time.monotonic() + timeout_s + 60.0  # starting takes its time on a busy machine

    while len(outcomes) < count:
        paths = [folder / f"{len(outcomes)}.{rank}.done" for rank in range(len(ranks))]
        if all(path.exists() for path in paths):
            outcomes.append([pickle.loads(path.read_bytes()) for path in paths])
            if len({outcome.error is None for outcome in outcomes[-1]}) == 2:
                return outcomes  # ranks may be in different collectives now
            deadline = time.monotonic() + timeout_s
            continue
        dead = [
            r for r, process in enumerate(ranks) if process.exitcode is not None and not paths[r].exists()
        ]
        if dead or time.monotonic() > deadline:
            why = f"ranks {dead} died" if dead else f"not done in {timeout_s} s"
            traces = [path.read_text() for path in sorted(folder.glob("*.trace"))]
            late = Outcome(error="\n".join([f"RankError: {why}", *traces]))
            outcomes.append([pickle.loads(path.read_bytes()) if path.exists() else late for path in paths])
            return outcomes
        time.sleep(0.02)

    return outcomes


def _turns(
    fn: Callable[..., Any], cells: list[Any], args: tuple[Any, ...], folder: str, timeout_s: float
) -> None:
    import torch.distributed as dist

    rank = dist.get_rank()
    with (Path(folder) / f"{rank}.trace").open("w") as trace:
        for i, cell in enumerate(cells):
            faulthandler.dump_traceback_later(0.8 * timeout_s, file=trace)
            try:
                outcome = Outcome(value=on_cpu(fn(cell, *args)))
            except BaseException as err:
                outcome = Outcome(error=f"{type(err).__name__}: {err}\n{traceback.format_exc()}")
            faulthandler.cancel_dump_traceback_later()
            path = Path(folder) / f"{i}.{rank}"
            path.write_bytes(pickle.dumps(outcome))
            with contextlib.suppress(FileNotFoundError):
                os.replace(path, f"{path}.done")
            gc.collect()
