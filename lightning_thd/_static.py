"""In what run the code of a thread is: recorded in a graph for other batches, a trial run, or in backward."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

# In what run the code of this thread is:
# - ``static``: whether it is inside ``static_shapes``;
# - ``trial``: whether it is inside ``trial_runs``;
# - ``scope``: the top of the stack of running models, see ``models.pack.Scope``;
# - ``notes``: the noted batches of the running step, see ``batch.noted``.
# Each thread has its own, because backward recomputes checkpoints in its own threads. This is no ContextVar,
# which torch.compile cannot trace, and no subclass with defaults, in which torch.compile (2.13) loses values
# that a traced hook stores.
RUN = threading.local()
RUN.scope = None
ONLY_LOOKS = "_thd_only_looks"  # the attribute of a hook that does not change a step's results


@contextlib.contextmanager
def static_shapes() -> Iterator[None]:
    """Mark a context whose code must not read values of tensors, because its recording is replayed."""
    before = shapes_are_static()
    RUN.static = True
    try:
        yield
    finally:
        RUN.static = before


def shapes_are_static() -> bool:
    """Return whether the code runs inside :func:`static_shapes`."""
    return getattr(RUN, "static", False)


@contextlib.contextmanager
def trial_runs() -> Iterator[None]:
    """Mark a context whose runs of a model are no part of training, so that hooks do not count them."""
    before = is_trial()
    RUN.trial = True
    try:
        yield
    finally:
        RUN.trial = before  # a trial may run inside another


def is_trial() -> bool:
    """Return whether the code runs inside :func:`trial_runs`."""
    return getattr(RUN, "trial", False)


def in_backward() -> bool:
    """Return whether autograd runs this code, as when activation checkpointing recomputes a layer."""
    from torch.utils.module_tracker import ModuleTracker  # this module loads without torch

    # torch's public way to ask. A tracker that is not entered hooks nothing.
    return bool(ModuleTracker().is_bw)


def only_looking(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that does not change a step's results: graphs stay valid with it, captures skip it."""
    look = functools.partial(_unless_trial, hook)
    setattr(look, ONLY_LOOKS, True)
    return look


def _unless_trial(hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a hook, but not in a trial run."""
    if is_trial():
        return None
    return hook(*args, **kwargs)
