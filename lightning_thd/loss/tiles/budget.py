"""Sizes and a byte budget -> rows and columns of a tile."""

from __future__ import annotations

from typing import Literal

import torch

# Bytes of the two scratch tiles. CPU: two 8 MiB tiles stay in a last-level cache and keep the multiplier
# at full speed (measured: 1024 x 2048 within 3 % of one large product). Accelerators: 256 MiB, 1/75 of the
# fp32 logits of 32k tokens x 152k vocabulary, and large enough to fill the device.
CPU_BYTES = 16 * 2**20
_ACCELERATOR_BYTES = 256 * 2**20
# Bytes of the logits the scalar loss keeps at a time. CPU: 64 MiB are 512 rows of a 32k vocabulary, 1/15
# of the memory F.cross_entropy takes together with the gradients.
_CPU_STASH_BYTES = 64 * 2**20
_ACCELERATOR_STASH_BYTES = 512 * 2**20
_WIDEST = {"cpu": 2048}
_WIDEST_ACCELERATOR = 8192


def tile_shape(
    rows: int, columns: int, *, device: torch.device, itemsize: int, chunk: int | Literal["auto"]
) -> tuple[int, int]:
    """Choose rows and columns of a tile of R x V so that two of them fit the budget of their device.

    Returns:
        For 8,192 x 32,000 in fp32 on a CPU ``(1024, 2048)``.

    Raises:
        ValueError: for a chunk below 1.
    """
    if chunk != "auto" and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"chunk is {chunk!r}, wanted 'auto' or the number of tokens in a tile, at least 1.")
    budget = CPU_BYTES if device.type == "cpu" else _ACCELERATOR_BYTES
    elements = budget // (2 * itemsize)
    widest = _WIDEST.get(device.type, _WIDEST_ACCELERATOR)
    if chunk == "auto":
        wide = max(1, min(columns, widest))
        return max(1, min(rows, elements // wide)), wide
    return max(1, min(rows, chunk)), max(1, min(columns, max(widest, elements // chunk)))


def stash_rows(
    rows: int, columns: int, *, device: torch.device, itemsize: int, chunk: int | Literal["auto"]
) -> int:
    """Choose how many rows' logits the scalar loss keeps: what fits, but enough to keep the multiplier busy.

    Returns:
        On a CPU for 8,192 rows and 32,000 columns in fp32 512, for 151,936 columns 256.
    """
    if chunk != "auto":
        return max(1, min(rows, chunk))
    on_cpu = device.type == "cpu"
    budget, fewest = (_CPU_STASH_BYTES, 256) if on_cpu else (_ACCELERATOR_STASH_BYTES, 1024)
    fitting = budget // (max(1, columns) * itemsize) // 64 * 64
    return max(1, min(rows, max(fewest, fitting)))
