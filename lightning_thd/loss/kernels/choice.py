"""A head's device and dtypes -> whether the kernels of ``rows`` compute its rows, or torch's operators do."""

from __future__ import annotations

from functools import cache

import torch

from lightning_thd._imports import installed


def kernels_serve(device: torch.device, *, compute: torch.dtype, accumulator: torch.dtype) -> bool:
    """Return whether the kernels compute the rows of a head with products of these dtypes on a device.

    Half precision stays with torch's operators, because gradients in fp16 are scaled by their largest
    element first. So does fp64, because the kernels compute in fp32.
    """
    wide = accumulator == torch.float32 and compute in (torch.float32, torch.bfloat16)
    return wide and runs_triton(device)


def runs_triton(device: torch.device) -> bool:
    """Return whether Triton's kernels run on a device; on AMD's they were never tried."""
    return device.type == "cuda" and torch.version.hip is None and _has_triton()


@cache
def _has_triton() -> bool:
    return installed("triton")
