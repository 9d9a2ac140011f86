"""A context manager -> whether code runs while a step is recorded for replay, when it must read no values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_STATIC: ContextVar[bool] = ContextVar("lightning_thd_static_shapes", default=False)


@contextlib.contextmanager
def static_shapes() -> Iterator[None]:
    """Make code inside read no values of tensors, so that every shape follows from T, S and max_seqlen.

    For code that records a step once and replays it on other batches, a CUDA graph above all. Checks of
    values are left out, and so are savings that depend on values; results are the same.
    """
    token = _STATIC.set(True)
    try:
        yield
    finally:
        _STATIC.reset(token)


def shapes_are_static() -> bool:
    """Say whether the code runs inside :func:`static_shapes`."""
    return _STATIC.get()
