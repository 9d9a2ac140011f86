"""Whether the running code is recorded in a graph, to be replayed on other batches, or is a trial run."""

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


@contextlib.contextmanager
def trial_runs() -> Iterator[None]:
    """Mark a context whose runs of a model are no part of training, so that hooks do not count them."""
    STATIC.trial = True
    try:
        yield
    finally:
        STATIC.trial = False
