"""A context in which a step is recorded for later batches; code inside must not read values of tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

STATIC: ContextVar[bool] = ContextVar("lightning_thd_static_shapes", default=False)


@contextlib.contextmanager
def static_shapes() -> Iterator[None]:
    """Forbid reads of tensor values in this context, because the recorded step replays on other batches."""
    token = STATIC.set(True)
    try:
        yield
    finally:
        STATIC.reset(token)


def shapes_are_static() -> bool:
    """Return whether the code runs inside :func:`static_shapes`."""
    return STATIC.get()
