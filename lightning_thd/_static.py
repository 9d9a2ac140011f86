"""A context manager for recording a step -> code inside may ask whether it must read no tensor values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_STATIC: ContextVar[bool] = ContextVar("lightning_thd_static_shapes", default=False)


@contextlib.contextmanager
def static_shapes() -> Iterator[None]:
    """Tell code in this context to read no tensor values, so that shapes depend on sizes alone.

    For code that records a step once and replays it on other batches, a CUDA graph above all. Checks of
    values are left out, and so are savings that depend on values; results are the same.
    """
    token = _STATIC.set(True)
    try:
        yield
    finally:
        _STATIC.reset(token)


def shapes_are_static() -> bool:
    """Return whether the code runs inside :func:`static_shapes`."""
    return _STATIC.get()
