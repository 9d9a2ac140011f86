"""The running call -> the line of the user's own code that made the call, for messages."""

from __future__ import annotations

import functools
import inspect
import linecache
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

# Code in installed packages, in the standard library and in this package is not the user's.
_OTHERS = (
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
    sysconfig.get_path("stdlib"),
    str(Path(__file__).parent),
    "<",
)
_TYPED = ("<ipython", "<stdin", "<string")  # Python's file names for code from a prompt or a notebook


def is_users(file: str) -> bool:
    """Return whether a source file is the user's, not one of an installed package or of this one."""
    return not (file.startswith(_OTHERS) or "site-packages" in file or "dist-packages" in file)


def calling_frame(wanted: Callable[[str], bool] = is_users) -> FrameType | None:
    """Return the innermost running frame for whose file ``wanted`` returns True."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not wanted(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def user_line() -> str:
    """Return the user's innermost running line, such as ``train.py:12: loss = model(x)``."""
    frame = calling_frame()
    return "an unknown line" if frame is None else described(frame.f_code.co_filename, frame.f_lineno)


def described(file: str, number: int) -> str:
    """Format a line for messages: file, number and text."""
    text = linecache.getline(file, number).strip()
    return f"{Path(file).name}:{number}: {text}" if text else f"{Path(file).name}:{number}"


def users_function(function: Any) -> str:
    """Return the name and line of a callable from the user's code; "" if it comes from elsewhere."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None or not (is_users(code.co_filename) or code.co_filename.startswith(_TYPED)):
        return ""
    return f"{code.co_name} ({described(code.co_filename, code.co_firstlineno)})"
