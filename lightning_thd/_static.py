"""A context in which a step is recorded for later batches; code inside must not read values of tensors."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

STATIC = threading.local()  # torch.compile traces it, and not a ContextVar


@contextlib.contextmanager
def static_shapes() -> Iterator[None]:
    """Mark a context that must not read tensor values, because its recorded step replays on other batches."""
    before, STATIC.on = shapes_are_static(), True
    try:
        yield
    finally:
        STATIC.on = before


def shapes_are_static() -> bool:
    """Return whether the code runs inside :func:`static_shapes`."""
    return getattr(STATIC, "on", False)
