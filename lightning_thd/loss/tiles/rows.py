"""Targets -> the rows whose target is not ignored, which alone are multiplied.

In fine-tuning most tokens have no target; leaving their rows out saves their products. How many are left
is data: it has to be read from the device, and shapes then vary from batch to batch. ``static_shapes``
turns that off, for the capture of a graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_thd._static import shapes_are_static

# Below this share of ignored rows their products cost less than a copy of the others.
_WORTH_SKIPPING = 0.05


def rows_with_target(targets: Tensor, ignore_index: int) -> tuple[Tensor | None, bool]:
    """Return the rows whose target ``[T]`` counts, or None where all rows should be multiplied.

    Returns:
        int64 ``[R]``, and whether the rows to multiply are known to count, all of them.
        ``[5, -100, -100, 7]`` gives ``([0, 3], True)``.
    """
    if (
        shapes_are_static()
        or targets.is_meta
        or (targets.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        return None, False
    counts = targets != ignore_index
    kept = int(counts.sum())  # one read of the device
    if kept > (1.0 - _WORTH_SKIPPING) * targets.numel():
        return None, kept == targets.numel()
    return counts.nonzero().squeeze(1), True
