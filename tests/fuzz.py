"""Random arguments -> every public function, which must answer or raise ValueError or TypeError.

``python -m tests.fuzz 10000 [SEED]`` prints every other exception with the call that raised it. A room
adds its functions by a module ``fuzz_table.py`` in its folder of tests: a dict ``TABLE`` of :class:`Entry`.
"""

from __future__ import annotations

import importlib
import logging
import os
import random
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.trust.record import record

_JUNK_SHARE = 0.35  # of the arguments of a call, at most; at least one call in four gets good ones alone
_HERE = Path.cwd()
_LONGEST_S = 60  # of a call; the longest good ones take 2 s on an idle machine


# AttributeError: what Python says of an argument of another class, which needs no words of ours.
REFUSALS = (ValueError, TypeError, AttributeError)


class Hung(Exception):
    """A call took so long that nobody would have waited for it."""


def _hung(signum: int, frame: Any) -> None:
    raise Hung(f"more than {_LONGEST_S} s")


@dataclass(frozen=True, slots=True)
class Entry:
    """One public function.

    Attributes:
        call: takes the arguments by name.
        good: makes arguments that it must answer.
        check: raises AssertionError for a wrong answer to good arguments; by default any answer is right.
        also: other exceptions that are right for this function, as ``SystemExit`` for the command line.
    """

    call: Callable[..., Any]
    good: Callable[[random.Random], dict[str, Any]]
    check: Callable[[dict[str, Any], Any], None] | None = None
    also: tuple[type[BaseException], ...] = ()


def junk(rng: random.Random) -> Any:
    """Make a value that somebody might pass by mistake."""
    numbers = [-1, 0, 1, 2, 3.7, float("nan"), float("inf"), 2**31, 2**63, 2**70, -(2**63), True, 1j]
    rows: list[Any] = [[], (), [1, 2], [1.5, 2.0], [-1, 3], [2**31], [2**63], [2**70], [[1, 2], [3]]]
    rows += [[[1, 2], [3, 4]], [None], ["a"], [{}], [True, False], range(3)]

    others: list[Any] = [
        None,
        "x",
        b"x",
        {},
        {"input_ids": [1]},
        {1, 2},
        object(),
        len,
        torch.int32,
        iter([1]),
    ]

    dtypes = [np.float64, np.int8, np.int32, np.int64, np.uint64, np.bool_, object, "U3", np.complex64]
    arrays = [np.ones(shape, dtype) for shape in ((), (0,), (3,), (2, 3)) for dtype in dtypes]

    kinds = [torch.float32, torch.bfloat16, torch.int8, torch.int32, torch.int64, torch.uint16, torch.bool]
    tensors = [torch.ones(shape, dtype=kind) for shape in ((), (0,), (3,), (2, 3)) for kind in kinds]
    tensors += [torch.ones(3, dtype=torch.int32, device="meta"), torch.ones(3, dtype=torch.complex64)]

    return rng.choice(rng.choice([numbers, rows, others, arrays, tensors]))


def tables() -> dict[str, Entry]:
    """Collect the tables of all rooms."""
    entries: dict[str, Entry] = {}
    here = Path(__file__).parent
    for file in sorted(here.glob("*/fuzz_table.py")):
        entries |= importlib.import_module(f"tests.{file.parent.name}.fuzz_table").TABLE
    return entries


def fuzz(calls: int, seed: int = 0, *, only: str = "") -> tuple[Counter[str], list[str]]:
    """Call the functions in turn.

    Returns:
        How often each outcome occurred, and a description of every call that ended in anything else.
    """
    table = {name: entry for name, entry in tables().items() if only in name}
    outcomes: Counter[str] = Counter()
    failures: list[str] = []

    for number in range(calls):
        name = list(table)[number % len(table)]
        rng = random.Random(f"{seed}/{number}")
        entry = table[name]
        arguments = table[name].good(rng)
        clean = rng.random() < 0.25
        for key in arguments:
            if not clean and rng.random() < _JUNK_SHARE:
                arguments[key] = junk(rng)
        before = signal.signal(signal.SIGALRM, _hung)
        signal.setitimer(signal.ITIMER_REAL, _LONGEST_S)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answer = entry.call(**arguments)
                if clean and entry.check is not None:
                    entry.check(arguments, answer)
            outcomes["answered"] += 1
        except (*REFUSALS, *entry.also) as err:
            outcomes[type(err).__name__] += 1
            if clean:
                failures.append(f"{name} refused good arguments {arguments!r:.300}: {err}")
            elif not str(err):
                failures.append(f"{name} raised {err!r} without a word: {arguments!r:.300}")
        except Exception as err:
            outcomes[type(err).__name__] += 1
            where = traceback.extract_tb(err.__traceback__)[-1]
            failures.append(f"{name}({arguments!r:.300}): {err!r:.200} at {where.filename}:{where.lineno}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    return outcomes, failures


def main() -> None:
    calls = int(sys.argv[1])
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    only = sys.argv[3] if len(sys.argv) > 3 else ""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # a call may write where a bad path says
        outcomes, failures = fuzz(calls, seed, only=only)
        os.chdir(_HERE)

    first = {failure.rpartition(" at ")[2]: failure for failure in reversed(failures)}  # of each place
    sys.stdout.write("\n".join([*first.values(), f"{dict(outcomes)}, {len(failures)} wrong", ""]))

    if not only:
        refused = outcomes.total() - outcomes["answered"]
        rows = {"public functions": len(tables()), "calls": calls, "answered": outcomes["answered"]}
        record(
            "fuzz",
            rows | {"refused with ValueError, TypeError or AttributeError": refused, "wrong": len(failures)},
        )

    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
