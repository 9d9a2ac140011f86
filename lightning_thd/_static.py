"""Whether a step is being recorded for replay: shapes depend on sizes alone then, and values are not read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_STATIC: ContextVar[bool] = ContextVar("lightning_thd_static_shapes", default=False)


@contextlib.contextmanager
def static_shapes() -> Iterator[None]:
    """Keep every shape a function of T, S and the longest sequence, and look at no value.

    For code that records a step once and replays it on other batches, a CUDA graph above all. What is left
    out are checks of values and savings that depend on them; results are the same.
    """
    token = _STATIC.set(True)
    try:
        yield
    finally:
        _STATIC.reset(token)


def shapes_are_static() -> bool:
    """Say whether the code runs inside :func:`static_shapes`."""
    return _STATIC.get()
