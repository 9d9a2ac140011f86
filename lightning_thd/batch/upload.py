"""The tensors of a batch -> one pinned buffer -> the same tensors on a GPU, by one copy.

Int64 tensors are sent as int32 if their values fit. Positions that count from 0 in every sequence are
computed on the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_thd._trees import tree_flatten, tree_unflatten
from lightning_thd.seqlens import position_ids_from_cu_seqlens

_ALIGNMENT = 16  # in bytes; enough for every dtype
_INT32 = np.iinfo(np.int32)
_POSITIONS = "position_ids"
_OFFSETS = "boundaries.offsets"


class _Part(NamedTuple):
    """A tensor in the buffer: its first byte, its dtype and shape there, and its dtype on the device."""

    start: int
    sent_dtype: torch.dtype
    shape: torch.Size
    dtype: torch.dtype


class PinnedBatch:
    """CPU tensors by name, copied into one page-locked buffer."""

    def __init__(self, tensors: dict[str, Tensor], padded_lengths: Sequence[int]) -> None:
        self._separate = dict[str, Tensor]()  # copied one by one: sparse, learned or on a device
        self._slots = sum(padded_lengths)
        self._copied = [(x, x._version) for x in tensors.values() if not x.is_inference()]
        positions = tensors[_POSITIONS]
        self._computes_positions = positions.dtype == torch.int64 and _counts_up(positions, padded_lengths)
        sent = {}
        for name, x in tensors.items():
            if x.device.type != "cpu" or x.layout != torch.strided or x.is_quantized or x.requires_grad:
                self._separate[name] = x
            elif name != _POSITIONS or not self._computes_positions:
                sent[name] = x
        self._parts, self._buffer = _pinned(sent, shrink=True)

    def holds(self, tensors: dict[str, Tensor]) -> bool:
        """Return whether these are the copied tensors, unchanged; inference tensors hide changes."""
        same = (x is y and x._version == n for x, (y, n) in zip(tensors.values(), self._copied, strict=False))
        return len(tensors) == len(self._copied) and all(same)

    def to(self, device: torch.device, *, non_blocking: bool) -> dict[str, Tensor]:
        """Return the tensors on a CUDA device, with their original names and dtypes."""
        buffer = self._buffer.to(device, non_blocking=non_blocking)
        found = {name: _view(buffer, part).to(part.dtype) for name, part in self._parts.items()}
        if self._computes_positions:
            found[_POSITIONS] = position_ids_from_cu_seqlens(found[_OFFSETS], self._slots)
        return found | {k: x.to(device, non_blocking=non_blocking) for k, x in self._separate.items()}


def uploaded(found: Any, device: torch.device) -> Any:
    """Copy arrays in nested tuples and lists to a device, without waiting for it."""
    leaves, structure = tree_flatten(found)
    arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, np.ndarray)}
    tensors = {i: torch.from_numpy(array) for i, array in arrays.items()}
    if device.type == "cuda":
        parts, pinned = _pinned(tensors, shrink=False)
        buffer = pinned.to(device, non_blocking=True)
        tensors = {i: _view(buffer, part) for i, part in parts.items()}
    for i, tensor in tensors.items():
        # A copy to MPS that does not block would read freed memory.
        leaves[i] = tensor.to(device, non_blocking=device.type != "mps")
    return tree_unflatten(leaves, structure)


def version(tensor: Tensor) -> int:
    """Return how often code has written to a tensor in place; -1 for inference tensors, which hide it."""
    return -1 if tensor.is_inference() else tensor._version


def _pinned(tensors: Mapping[Any, Tensor], *, shrink: bool) -> tuple[dict[Any, _Part], Tensor]:
    """Copy tensors into one page-locked buffer; with ``shrink``, int64 becomes int32 if its values fit."""
    parts, size = dict[Any, _Part](), 0
    for name, tensor in tensors.items():
        sent_dtype = torch.int32 if shrink and _fits(tensor) else tensor.dtype
        parts[name] = _Part(size, sent_dtype, tensor.shape, tensor.dtype)
        size += -(-tensor.numel() * sent_dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    for name, part in parts.items():
        _view(buffer, part).copy_(tensors[name])
    return parts, buffer


def _view(buffer: Tensor, part: _Part) -> Tensor:
    end = part.start + part.shape.numel() * part.sent_dtype.itemsize
    return buffer[part.start : end].view(part.sent_dtype).view(part.shape)


def _fits(tensor: Tensor) -> bool:
    if tensor.dtype != torch.int64 or not tensor.numel():
        return False
    least, most = tensor.aminmax()
    return int(least) >= _INT32.min and int(most) <= _INT32.max


def _counts_up(positions: Tensor, lengths: Sequence[int]) -> bool:
    if positions.ndim != 1 or positions.shape[0] != sum(lengths) or not positions.is_cpu:
        return False
    each = np.asarray(lengths, np.int64)
    ends = np.cumsum(each)
    return bool(np.array_equal(positions.numpy(), np.arange(len(positions)) - np.repeat(ends - each, each)))
