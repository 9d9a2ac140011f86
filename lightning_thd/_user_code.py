"""The call stack -> the innermost line in the user's code, for messages."""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

_NOT_THE_USERS = (
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("purelib", "platlib", "stdlib")),
    f"{Path(__file__).parent}{os.sep}",  # not every path that begins with this package's name
    "<",  # code without a file, such as <frozen importlib>
)
_TYPED = ("<ipython", "<stdin", "<string")  # Python's file names for code from a prompt or a notebook


def is_users(file: str) -> bool:
    """Return whether a source file is the user's; installed packages and this package are not."""
    return not (file.startswith(_NOT_THE_USERS) or "site-packages" in file or "dist-packages" in file)


def calling_frame(wanted: Callable[[str], bool] = is_users) -> FrameType | None:
    """Return the innermost frame of the call stack whose file is ``wanted``, or None."""
    frame = inspect.currentframe()
    frame = None if frame is None else frame.f_back
    while frame is not None and not wanted(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def user_line() -> str:
    """Return the running line of the user's code, such as ``train.py:12: f(x)``, or "an unknown line"."""
    frame = calling_frame()
    return "an unknown line" if frame is None else described(frame.f_code.co_filename, frame.f_lineno)


def described(file: str, number: int) -> str:
    """Format a source line for messages: file name, line number and text."""
    text = linecache.getline(file, number).strip()
    return f"{Path(file).name}:{number}: {text}" if text else f"{Path(file).name}:{number}"


def definition_of(function: Any) -> str:
    """Return the line on which a function is defined, such as ``train.py:12: def f(x):``; "" if unknown."""
    code = getattr(function, "__code__", None)
    return "" if code is None else described(code.co_filename, code.co_firstlineno)


def users_function(function: Any) -> str:
    """Return the name and line of a callable that the user's code defines; "" for any other."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    function = getattr(function, "__func__", function)  # a method's function
    code = getattr(function, "__code__", None)
    if code is None:  # an object that is called, whose class may be the user's
        code = getattr(type(function).__call__, "__code__", None)
    if code is None:
        return ""
    if not (is_users(code.co_filename) or code.co_filename.startswith(_TYPED)):
        return ""
    return f"{code.co_name} ({described(code.co_filename, code.co_firstlineno)})"
