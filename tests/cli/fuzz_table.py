"""The command line, for ``tests.fuzz``: whatever words come, it does it or says why not and ends."""

from __future__ import annotations

import contextlib
import io
import random
from typing import Any

from lightning_thd.cli import main
from tests.data.fuzz_table import HERE
from tests.fuzz import Entry

_WORDS = ("plan", "peaks", "flops", "check", "--capacity", "-1", "32", "x.jsonl", "--json", "nan", "")


def _words(rng: random.Random) -> list[str]:
    return [rng.choice(_WORDS) for _ in range(rng.randint(1, 5))]


def _quietly(arguments: Any) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(arguments)


def _any_words(arguments: Any) -> None:
    with contextlib.suppress(SystemExit):
        _quietly(arguments)


TABLE = {
    "cli.main": Entry(
        _quietly,
        lambda _: {"arguments": ["plan", str(HERE / "a.jsonl"), "--capacity", "64", "--json"]},
        also=(SystemExit,),
    ),
    "cli.main of odd words": Entry(
        _any_words, lambda rng: {"arguments": _words(rng)}, also=(ModuleNotFoundError,)
    ),
}
