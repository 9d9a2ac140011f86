"""A context in which a step is recorded for later batches; code inside must not read values of tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

STATIC: ContextVar[bool] = ContextVar("lightning_thd_static_shapes", default=False)


@contextlib.contextmanager
def static_shapes() -> Iterator[None]:
    """Mark a context that must not read tensor values, because its recorded step replays on other batches."""
    token = STATIC.set(True)
    try:
        yield
    finally:
        STATIC.reset(token)


def shapes_are_static() -> bool:
    """Return whether the code runs inside :func:`static_shapes`."""
    return STATIC.get()
