"""The running call -> the line of the user's file that made it, for messages."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from pathlib import Path
from types import FrameType

# Where nobody writes a training_step: installed packages, the standard library, this package.
_OTHERS = (
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
    sysconfig.get_path("stdlib"),
    str(Path(__file__).parents[2]),
    "<",
)


def user_line() -> str:
    """Return file, number and text of the innermost running line that the user wrote.

    Returns:
        ``train.py:12: loss = causal_lm_loss(self.model, batch)``; an unknown line is "an unknown line".
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            return described(file, frame.f_lineno)
        frame = frame.f_back
    return "an unknown line"


def is_users(file: str) -> bool:
    """Return whether a file of code is the user's, and not of an installed package or this one."""
    return not file.startswith(_OTHERS)


def described(file: str, number: int) -> str:
    """Format a line for messages: file, number and text."""
    text = linecache.getline(file, number).strip()
    return f"{Path(file).name}:{number}: {text}" if text else f"{Path(file).name}:{number}"
