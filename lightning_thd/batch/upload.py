"""The tensors of a batch -> one pinned buffer -> the same tensors on a GPU, by one copy.

Int64 tensors are sent as int32 if their values fit. Positions that count from 0 in every sequence are
computed on the GPU. The buffer begins with a header of where each tensor begins, from which a captured step
reads the batch: it copies the buffer, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_thd._private import private_getter
from lightning_thd._trees import tree_flatten, tree_unflatten
from lightning_thd.seqlens import position_ids_from_cu_seqlens

_ALIGNMENT = 16  # in bytes; enough for every dtype
_INT32 = np.iinfo(np.int32)
_IDS, _TARGETS, _POSITIONS = "input_ids", "targets", "position_ids"
_OFFSETS, _REAL_OFFSETS = "boundaries.offsets", "boundaries.real_offsets"
_HEADER = "header"
_count_of_writes = private_getter("torch.Tensor._version")


class Header:
    """The places of a header's int32 numbers.

    Starts are counted in int32 numbers from the start of the header.
    """

    SLOTS = 0  # slots of all sequences, without a pad at the end
    SEQUENCES = 1  # sequences, without empty ones at the end
    SCALE = 2  # the loss scale, an fp64 number in the place of two
    OFFSETS = 4  # starts of the offsets in memory, and of the cumulative real lengths
    ROWS = 6  # starts of ids, targets, and one to three axes of positions; -1 for positions that are not sent
    AXES = 3  # the most axes of positions
    SIZE = 12  # the length of the header

    @classmethod
    def of(
        cls, filled: Filled, *, offsets: Sequence[int], rows: Sequence[int]
    ) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Return a header: ``offsets`` are two starts, and ``rows`` three to five."""
        header = np.zeros(cls.SIZE, np.int32)
        header[cls.SLOTS] = filled.slots
        header[cls.SEQUENCES] = filled.sequences
        header[cls.SCALE : cls.SCALE + 2].view(np.float64)[0] = filled.loss_scale
        header[cls.OFFSETS : cls.OFFSETS + 2] = offsets
        header[cls.ROWS : cls.ROWS + len(rows)] = rows
        return header


class Filled(NamedTuple):
    """What the host knows of a batch: slots and sequences without a pad at the end, and the loss scale."""

    slots: int
    sequences: int
    loss_scale: float

    @classmethod
    def of(cls, padded_lengths: Sequence[int], loss_scale: float) -> Filled:
        """Count the slots of padded lengths, and the sequences without empty ones at the end."""
        count = len(padded_lengths)
        while count and padded_lengths[count - 1] == 0:
            count -= 1
        return cls(sum(padded_lengths), count, loss_scale)


class _Part(NamedTuple):
    """A tensor in the buffer: its first byte, its bytes and those of the gap behind it, and what it is.

    ``sent_dtype`` is its dtype in the buffer, ``dtype`` that on the device.
    """

    start: int
    num_bytes: int
    gap: int
    sent_dtype: torch.dtype
    shape: torch.Size
    dtype: torch.dtype


class Arrived:
    """The buffer in which a batch came to its device, and the tensors that were made of it."""

    def __init__(self, numbers: Tensor, tensors: dict[str, Tensor]) -> None:
        self._numbers = numbers
        self._tensors = [*tensors.values()]
        self._versions = versions(self._tensors)

    def numbers(self) -> Tensor | None:
        """Return the buffer as int32, with its header; None if a tensor was, or may have been, written to."""
        now = versions(self._tensors)
        return self._numbers if now == self._versions and -1 not in now else None


class PinnedBatch:
    """CPU tensors by name, copied into one page-locked buffer.

    With ``filled`` the buffer begins with a header, if int32 holds all that a captured step reads.
    """

    def __init__(
        self, tensors: dict[str, Tensor], padded_lengths: Sequence[int], filled: Filled | None = None
    ) -> None:
        self._separate = dict[str, Tensor]()  # copied one by one: sparse, learned or on a device
        self._slots = sum(padded_lengths)
        # By their versions ``holds`` notices a change.
        self._copied = [*tensors.values()]
        self._versions = versions(self._copied)

        positions = tensors[_POSITIONS]
        self._computes_positions = positions.dtype == torch.int64 and _counts_up(positions, padded_lengths)
        sent = {} if filled is None else {_HEADER: torch.zeros(Header.SIZE, dtype=torch.int32, device="cpu")}
        for name, x in tensors.items():
            if x.device.type != "cpu" or x.layout != torch.strided or x.is_quantized or x.requires_grad:
                self._separate[name] = x
            elif name != _POSITIONS or not self._computes_positions:
                sent[name] = x
        self._parts, self._buffer = _pinned(sent, shrink=True)
        self._has_header = filled is not None and self._write_header(filled, tensors[_POSITIONS])

    def _write_header(self, filled: Filled, positions: Tensor) -> bool:
        """Write the header; return False if a captured step could not read the buffer."""
        parts = self._parts
        needed = [_IDS, _TARGETS, _OFFSETS, *([] if self._computes_positions else [_POSITIONS])]
        if any(name not in parts or parts[name].sent_dtype != torch.int32 for name in needed):
            return False
        if positions.ndim > 2 or (positions.ndim == 2 and positions.shape[0] != Header.AXES):
            return False

        start = {name: part.start // torch.int32.itemsize for name, part in parts.items()}
        rows = [start[_IDS], start[_TARGETS]]
        if self._computes_positions:
            rows.append(-1)
        else:
            axes = 1 if positions.ndim == 1 else positions.shape[0]
            rows += [start[_POSITIONS] + axis * positions.shape[-1] for axis in range(axes)]
        offsets = start[_OFFSETS], start.get(_REAL_OFFSETS, start[_OFFSETS])
        header = Header.of(filled, offsets=offsets, rows=rows)
        _views(self._buffer, parts)[_HEADER].copy_(torch.from_numpy(header))
        return True

    def holds(self, tensors: dict[str, Tensor]) -> bool:
        """Return whether these are the copied tensors, unchanged; inference tensors hide changes."""
        now = versions(tensors.values())
        are_same = [*map(id, tensors.values())] == [*map(id, self._copied)]
        return are_same and now == self._versions and -1 not in now

    def to(self, device: torch.device, *, non_blocking: bool) -> tuple[dict[str, Tensor], Arrived | None]:
        """Return the tensors on a CUDA device, in their own dtypes, and the buffer that they came in."""
        buffer = self._buffer.to(device, non_blocking=non_blocking)
        tensors = _views(buffer, self._parts)
        tensors.pop(_HEADER, None)
        tensors = {name: x.to(self._parts[name].dtype) for name, x in tensors.items()}
        if self._computes_positions:
            tensors[_POSITIONS] = position_ids_from_cu_seqlens(tensors[_OFFSETS], self._slots)
        for name, x in self._separate.items():
            tensors[name] = x.to(device, non_blocking=non_blocking)

        if not self._has_header:
            return tensors, None
        return tensors, Arrived(buffer.view(torch.int32), tensors)


def uploaded(tree: Any, device: torch.device) -> Any:
    """Copy arrays in nested tuples and lists to a device, without waiting for it."""
    leaves, structure = tree_flatten(tree)
    tensors = {i: torch.from_numpy(leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, np.ndarray)}
    if device.type == "cuda":
        parts, pinned = _pinned(tensors, shrink=False)
        tensors = _views(pinned.to(device, non_blocking=True), parts)
    for i, tensor in tensors.items():
        # A copy to MPS that does not block would read freed memory.
        leaves[i] = tensor.to(device, non_blocking=device.type != "mps")
    return tree_unflatten(leaves, structure)


def version(tensor: Tensor) -> int:
    """Return how often code has written to a tensor in place; -1 for inference tensors, which hide it."""
    if tensor.is_inference():
        return -1
    number: int = _count_of_writes(tensor)
    return number


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """Return the :func:`version` of each tensor, without a Python call for each in the usual case."""
    tensors = [*tensors]
    if any(map(Tensor.is_inference, tensors)):
        return [*map(version, tensors)]
    return [*map(_count_of_writes, tensors)]


def _pinned(tensors: Mapping[Any, Tensor], *, shrink: bool) -> tuple[dict[Any, _Part], Tensor]:
    """Copy tensors into one page-locked buffer; with ``shrink``, int64 becomes int32 if its values fit."""
    parts = dict[Any, _Part]()
    num_bytes = 0
    for name, tensor in tensors.items():
        sent_dtype = torch.int32 if shrink and _fits_int32(tensor) else tensor.dtype
        of_tensor = tensor.numel() * sent_dtype.itemsize
        gap = -of_tensor % _ALIGNMENT
        parts[name] = _Part(num_bytes, of_tensor, gap, sent_dtype, tensor.shape, tensor.dtype)
        num_bytes += of_tensor + gap

    buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    for name, view in _views(buffer, parts).items():
        view.copy_(tensors[name])
    return parts, buffer


def _views(buffer: Tensor, parts: Mapping[Any, _Part]) -> dict[Any, Tensor]:
    """Return the parts of the buffer as the tensors that were copied there, by name."""
    sizes = [size for part in parts.values() for size in (part.num_bytes, part.gap)]
    tensors = buffer.split_with_sizes(sizes)[::2]
    return {
        name: x.view(part.sent_dtype).view(part.shape)
        for (name, part), x in zip(parts.items(), tensors, strict=True)
    }


def _fits_int32(tensor: Tensor) -> bool:
    """Return whether a tensor is int64 and its values fit int32."""
    if tensor.dtype != torch.int64 or not tensor.numel():
        return False
    least, most = tensor.aminmax()
    return int(least) >= _INT32.min and int(most) <= _INT32.max


def _counts_up(positions: Tensor, lengths: Sequence[int]) -> bool:
    """Return whether positions count from 0 in every sequence, so that the GPU can compute them."""
    if positions.ndim != 1 or positions.shape[0] != sum(lengths) or not positions.is_cpu:
        return False
    sizes = np.asarray(lengths, np.int64)
    starts = np.cumsum(sizes) - sizes
    counted = np.arange(len(positions)) - np.repeat(starts, sizes)
    return np.array_equal(positions.numpy(), counted)
