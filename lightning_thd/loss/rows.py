"""Targets -> the rows worth multiplying.

In fine-tuning most tokens have no target; leaving their rows out saves their products. How many are left
is data: it has to be read from the device, and shapes then vary from batch to batch. ``static_shapes``
turns that off, for the capture of a graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

# Below this share of ignored rows their products cost less than a copy of the others.
_WORTH_SKIPPING = 0.05
_STATIC: ContextVar[bool] = ContextVar("lightning_thd_loss_static_shapes", default=False)


@contextlib.contextmanager
def static_shapes() -> Iterator[None]:
    """Keep ignored rows in the products, so that shapes depend on T alone and nothing is read from the
    device.

    For code that records a step once and replays it on other batches, a CUDA graph above all.
    """
    token = _STATIC.set(True)
    try:
        yield
    finally:
        _STATIC.reset(token)


def rows_with_target(targets: Tensor, ignore_index: int) -> Tensor | None:
    """Give the rows whose target counts, or None where all rows should be multiplied.

    Args:
        targets: int64 ``[T]``.
        ignore_index: marks rows that do not count.

    Returns:
        int64 ``[R]``. ``[5, -100, -100, 7]`` gives ``[0, 3]``.
    """
    if _STATIC.get() or (targets.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    counts = targets != ignore_index
    kept = int(counts.sum())  # one read of the device
    if kept > (1.0 - _WORTH_SKIPPING) * targets.numel():
        return None
    return counts.nonzero().squeeze(1)
