"""Sizes and a byte budget -> rows and columns of a tile."""

from __future__ import annotations

from typing import Literal

import torch

# Bytes of the two scratch tiles. CPU: two 8 MiB tiles stay in a last-level cache and keep the multiplier
# at full speed (measured: 1024 x 2048 within 3 % of one large product). Accelerators: 256 MiB are 1/75 of
# the fp32 logits of 32k tokens x 152k vocabulary, and large enough to fill the device.
CPU_BYTES = 16 * 2**20
_ACCELERATOR_BYTES = 256 * 2**20
# Bytes of the logits that the scalar loss keeps at a time. CPU: 64 MiB are 512 rows of a 32k vocabulary,
# 1/15 of the memory that F.cross_entropy takes together with the gradients.
_CPU_STASH_BYTES = 64 * 2**20
_ACCELERATOR_STASH_BYTES = 512 * 2**20
# Columns of a tile at most.
_WIDEST = {"cpu": 2048}
_WIDEST_ACCELERATOR = 8192


def tile_shape(
    rows: int, columns: int, *, device: torch.device, itemsize: int, chunk: int | Literal["auto"]
) -> tuple[int, int]:
    """Choose rows and columns of a tile so that two of them fit the budget of their device."""
    budget = CPU_BYTES if device.type == "cpu" else _ACCELERATOR_BYTES
    elements = budget // (2 * itemsize)
    widest = _WIDEST.get(device.type, _WIDEST_ACCELERATOR)
    if chunk == "auto":
        wide = max(1, min(columns, widest))
        return max(1, min(rows, elements // wide)), wide
    return max(1, min(rows, chunk)), max(1, min(columns, max(widest, elements // chunk)))


def stash_shape(
    rows: int,
    columns: int,
    *,
    device: torch.device,
    itemsize: int,
    kept_itemsize: int,
    chunk: int | Literal["auto"],
) -> tuple[int, int]:
    """Choose the tile of a loss that keeps the logits of a few rows, of ``kept_itemsize`` bytes each."""
    if chunk == "auto":
        on_cpu = device.type == "cpu"
        budget, fewest = (_CPU_STASH_BYTES, 256) if on_cpu else (_ACCELERATOR_STASH_BYTES, 1024)
        chunk = max(fewest, budget // (max(1, columns) * kept_itemsize) // 64 * 64)
    chunk = max(1, min(rows, chunk))
    return tile_shape(rows, columns, device=device, itemsize=itemsize, chunk=chunk)
