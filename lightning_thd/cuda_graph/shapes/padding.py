"""A batch and a bucket -> offsets, positions and whole batches of the bucket's size, from host integers.

T slots and S sequences of the bucket. The tail becomes dummy sequences without targets, of equal length.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_thd.batch import IGNORE_INDEX, THDBatch
from lightning_thd.cuda_graph.shapes.buckets import Bucket, Layout
from lightning_thd.seqlens import cu_seqlens_from_lengths, pad_cu_seqlens, position_ids_from_cu_seqlens

Ints = npt.NDArray[np.int64]


def padded_lengths_of(batch: THDBatch, bucket: Bucket, *, multiple: int = 1) -> Ints:
    """Return a batch's padded lengths and those of the dummy sequences that fill the bucket's tail.

    Args:
        batch: one that fits.
        bucket: its ``slots`` and ``max_seqlen`` are multiples of ``multiple``, as the batch's lengths are.
        multiple: of a dummy sequence.

    Returns:
        int64 ``[S]``. Lengths ``(3, 2)`` in 9 slots and 4 sequences become ``[3, 2, 2, 2]``.
    """
    kept = batch.padded_lengths[: Layout.of_batch(batch).sequences]
    units = [length // multiple for length in kept]
    offsets = pad_cu_seqlens(
        cu_seqlens_from_lengths(units),
        bucket.sequences,
        bucket.slots // multiple,
        max_seqlen=bucket.max_seqlen // multiple,
        lengths=units,
    )
    lengths: Ints = np.diff(offsets.numpy()).astype(np.int64) * multiple
    return lengths


def real_lengths_of(batch: THDBatch, padded_lengths: Ints) -> Ints:
    """Return the real length of every sequence, dummies included.

    Returns:
        int64 ``[S]``. Lengths 3 and 2, padded to 4 and 4 and a dummy of 8, give ``[3, 2, 8]``.
    """
    kept = Layout.of_batch(batch).sequences
    return np.concatenate([np.asarray(batch.lengths[:kept], dtype=np.int64), padded_lengths[kept:]])


def offsets_of(lengths: Ints) -> Tensor:
    """Return int32 offsets ``[S + 1]`` on the CPU: the lengths summed up from 0."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def pad_batch(batch: THDBatch, bucket: Bucket) -> THDBatch:
    """Pad a batch eagerly to a bucket's size, with everything the host knows of it.

    Returns:
        A new batch on the same device, of T slots and S + 1 offsets. The tail has no targets.
    """
    used, device = Layout.of_batch(batch).slots, batch.input_ids.device
    lengths = padded_lengths_of(batch, bucket)
    padded = offsets_of(lengths)
    same = tuple(batch.padded_lengths[: len(batch.lengths)]) == batch.lengths
    real = padded if same else offsets_of(real_lengths_of(batch, lengths))
    positions = position_ids_from_cu_seqlens(padded, bucket.slots)[used:].to(device)
    tail = positions.shape[0]
    positions = positions.expand(*batch.position_ids.shape[:-1], tail)
    return batch.replace(
        input_ids=torch.nn.functional.pad(batch.input_ids[:used], (0, tail)),
        targets=torch.nn.functional.pad(batch.targets[:used], (0, tail), value=IGNORE_INDEX),
        position_ids=torch.cat([batch.position_ids[..., :used], positions], dim=-1),
        cu_seqlens=real.to(device),
        cu_seqlens_padded=padded.to(device),
        padded_lengths=tuple(lengths.tolist()),
        max_seqlen=bucket.max_seqlen,
    )


def dummy_batch(
    layout: Layout, device: torch.device, *, axes: int | None = None, multiple: int = 1
) -> THDBatch:
    """Make a batch of token 0 with a target in every slot but the last, for warm-up and timing."""
    units = layout.slots // multiple
    count = max(1, min(layout.sequences, units))
    lengths = [multiple * (units // count + (i < units % count)) for i in range(count)]
    samples = [{"input_ids": torch.zeros(length, dtype=torch.int64)} for length in lengths]
    batch = THDBatch.collate(samples)
    if axes is not None:
        batch = batch.replace(position_ids=batch.position_ids.expand(axes, -1).contiguous())
    return batch.to(device)
