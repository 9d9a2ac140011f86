"""Problems that stop a capture -> ``CaptureError``, naming the line of the user's code."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import FrameType

import lightning
import torch

from lightning_thd import batch
from lightning_thd._user_code import calling_frame

_HERE = os.path.dirname(__file__) + os.sep
# The machinery between the user's line and ours. Model libraries are not in it: their lines are the answer.
_MACHINERY = (
    _HERE,
    os.path.dirname(os.path.abspath(batch.__file__)) + os.sep,
    os.path.join(os.path.dirname(os.path.dirname(__file__)), "callbacks", "cuda_graph.py"),
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    os.path.dirname(os.path.abspath(lightning.__file__)) + os.sep,
    os.path.dirname(os.__file__) + os.sep + "contextlib.py",
)


class CaptureError(RuntimeError):
    """A step that cannot be captured, and why; ``where`` is ``file:line in function``, or None."""

    def __init__(self, message: str, where: str | None = None) -> None:
        super().__init__(message if where is None else f"{where}: {message}")
        self.message = message
        self.where = where


Report = Callable[[str, str | None], None]
_REPORT: ContextVar[Report | None] = ContextVar("lightning_thd_capture_report", default=None)


def refuse(message: str) -> None:
    """Raise a :class:`CaptureError` naming the calling line, or only report it in :func:`reporting_to`."""
    report = _REPORT.get()
    if report is None:
        raise CaptureError(message, calling_line())
    report(message, calling_line())


@contextlib.contextmanager
def reporting_to(report: Report) -> Iterator[None]:
    """Send every problem found in this context to ``report`` instead of raising at the first."""
    token = _REPORT.set(report)
    try:
        yield
    finally:
        _REPORT.reset(token)


def calling_line() -> str | None:
    """Find the innermost running line of the user's code: ``"/path/model.py:12 in training_step"``."""
    frame = calling_frame(lambda file: not is_machinery(file))
    return None if frame is None else _describe(frame, frame.f_lineno)


def raising_line(error: BaseException) -> str | None:
    """Find the innermost line of the user's code in a traceback, as :func:`calling_line` does."""
    lines = traceback.walk_tb(error.__traceback__)
    found = [_describe(frame, n) for frame, n in lines if not is_machinery(frame.f_code.co_filename)]
    return found[-1] if found else None


def as_capture_error(error: Exception) -> CaptureError:
    """Return a :class:`CaptureError` that names an error's line, and holds no traceback, nor its batch."""
    if isinstance(error, CaptureError):
        return CaptureError(error.message, error.where)
    first_line = (str(error).strip() or "no message").splitlines()[0]
    return CaptureError(f"{type(error).__name__}: {first_line}", raising_line(error))


def is_machinery(filename: str) -> bool:
    """Return whether a file belongs to torch, Lightning or the machinery of captures, or is none."""
    return filename.startswith((*_MACHINERY, "<"))


def _describe(frame: FrameType, line: int) -> str:
    return f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
