"""Text of the command line -> numbers in their bounds, or a line of advice."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and name the nearest option for one that does not exist."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse arguments after all options in them are known."""
        args = sys.argv[1:] if args is None else list(args)
        known = [option for action in self._actions for option in action.option_strings]
        for given in (text.partition("=")[0] for text in args if text.startswith("--") and text != "--"):
            if not any(option.startswith(given) for option in known):
                self.error(f"there is no option {given}{nearest(given, known)}")
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def nearest(given: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the most similar known name, or "." if none is similar."""
    found = difflib.get_close_matches(given, list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else "."


def whole(least: int) -> Callable[[str], int]:
    """Return a type of argparse for whole numbers from ``least`` on: ``whole(1)("8")`` is 8."""

    def number(text: str) -> int:
        found = int(text)
        if found < least:
            raise argparse.ArgumentTypeError(f"{found}; wanted at least {least}")
        return found

    return number


def share(text: str) -> float:
    """Parse a number above 0 and at most 1."""
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text}; wanted a share, above 0 and at most 1")
    return number
