"""Problems that stop a capture -> ``CaptureError``, naming the line of the user's code."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import lightning
import torch

from lightning_thd import _modes, batch
from lightning_thd._user_code import calling_frame

# Code that may run between a line of the user and a report. Model libraries are not listed, so a problem in
# a library is reported with the library's line.
_MACHINERY = (
    os.path.dirname(__file__) + os.sep,
    os.path.dirname(os.path.abspath(batch.__file__)) + os.sep,
    os.path.abspath(_modes.__file__),
    os.path.join(os.path.dirname(os.path.dirname(__file__)), "callbacks", "cuda_graph.py"),
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    os.path.dirname(os.path.abspath(lightning.__file__)) + os.sep,
    *(os.path.join(os.path.dirname(os.__file__), name) for name in ("contextlib.py", f"logging{os.sep}")),
)


class CaptureError(RuntimeError):
    """The reason why a step cannot be captured; ``where`` is ``file:line in function``, or None."""

    def __init__(self, message: str, where: str | None = None) -> None:
        super().__init__(message if where is None else f"{where}: {message}")
        self.message = message
        self.where = where


# Takes a problem: what it is and what to do, and the line of the user's code or None.
Report = Callable[[str, str | None], None]


def refuse(message: str, where: str | None) -> NoReturn:
    """Raise a :class:`CaptureError`: the report of a capture, which stops at the first problem."""
    raise CaptureError(message, where)


def calling_line() -> str | None:
    """Return the innermost running line of the user's code: ``"/path/model.py:12 in training_step"``."""
    frame = calling_frame(lambda file: not is_machinery(file))
    return None if frame is None else _describe(frame, frame.f_lineno)


def raising_line(error: BaseException) -> str | None:
    """Return the innermost line of the user's code in a traceback, formatted as by :func:`calling_line`."""
    innermost = None
    for frame, line in traceback.walk_tb(error.__traceback__):  # from the outside in
        if not is_machinery(frame.f_code.co_filename):
            innermost = _describe(frame, line)
    return innermost


def as_capture_error(error: Exception) -> CaptureError:
    """Return a :class:`CaptureError` with an error's line, but no traceback: it would hold the batch."""
    if isinstance(error, CaptureError):
        return CaptureError(error.message, error.where)
    first_line = (str(error).strip() or "no message").splitlines()[0]
    return CaptureError(f"{type(error).__name__}: {first_line}", raising_line(error))


def is_machinery(filename: str) -> bool:
    """Return whether a file is in ``_MACHINERY`` (torch, Lightning, ...), or is no real file."""
    return filename.startswith((*_MACHINERY, "<"))


def _describe(frame: FrameType, line: int) -> str:
    """Return ``"/path/model.py:12 in training_step"``."""
    return f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
