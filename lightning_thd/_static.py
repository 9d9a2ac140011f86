"""Whether the running code is recorded in a graph, which is then replayed on other batches."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

STATIC = threading.local()  # not a ContextVar, which torch.compile cannot trace


@contextlib.contextmanager
def static_shapes() -> Iterator[None]:
    """Mark a context whose code must not read values of tensors, because its recording is replayed."""
    before, STATIC.on = shapes_are_static(), True
    try:
        yield
    finally:
        STATIC.on = before


def shapes_are_static() -> bool:
    """Return whether the code runs inside :func:`static_shapes`."""
    return getattr(STATIC, "on", False)
