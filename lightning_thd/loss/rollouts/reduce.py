"""Values of slots -> sums of sequences, and of the ranks that share them; deterministic, differentiable.

T slots, B segments.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_thd.parallel.exchange import mapped, reduced


def segment_sums(values: Tensor, segment: Tensor, num_segments: int) -> Tensor:
    """Add up values by segment, without atomics and without reading the device.

    Args:
        values: floats ``[T]``.
        segment: int64 ``[T]``, never falling; entries of ``num_segments`` and above are left out.
        num_segments: B.

    Returns:
        ``[B]``. ``([1., 2., 3.], [0, 0, 2], 3)`` becomes ``[3., 0., 3.]``.
    """
    bounds = torch.arange(num_segments + 1, device=segment.device)
    offsets = torch.searchsorted(segment.contiguous(), bounds)
    sums: Tensor = torch.segment_reduce(values, "sum", offsets=offsets, initial=0, unsafe=True)
    return sums


def sum_over_group(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum a tensor over ranks, with the gradient of the sum of all ranks' losses."""
    total = partial(reduced, group=group)
    return mapped(values, total, total)
