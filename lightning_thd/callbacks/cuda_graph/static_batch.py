"""A bucket -> tensors of fixed address that any batch which fits is copied into, and the batch a step sees.

T slots and S sequences of the bucket, t and s of the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_thd.batch import IGNORE_INDEX, THDBatch
from lightning_thd.callbacks.cuda_graph.buckets import Bucket, Layout
from lightning_thd.callbacks.cuda_graph.errors import refuse
from lightning_thd.seqlens import cu_seqlens_from_lengths, pad_cu_seqlens, position_ids_from_cu_seqlens

_FIELDS = ("input_ids", "targets", "position_ids", "cu_seqlens", "cu_seqlens_padded")


_ADVICE = (
    "which the host knows and which changes from batch to batch; a captured step would go on with the value "
    "of the batch it was captured on. Use the tensors of the batch (cu_seqlens, targets, loss_scale), or "
    "move this to on_train_batch_start."
)


def _refused(name: str) -> property:
    def read(self: StaticBatch) -> Any:
        refuse(f"the step reads batch.{name}, {_ADVICE}")
        return THDBatch.__dict__[name].__get__(self)  # only lint_capture, which stores it, comes here

    return property(read)


class StaticBatch(THDBatch):
    """The batch a captured step sees: tensors of fixed address; what only the host knows raises.

    ``max_seqlen`` is the bucket's, and ``loss_scale`` a tensor ``[]``.
    """

    __slots__ = ()

    lengths = _refused("lengths")
    padded_lengths = _refused("padded_lengths")
    stats = _refused("stats")
    sequence_ids = _refused("sequence_ids")
    loss_tokens = _refused("loss_tokens")

    @classmethod
    def build(cls, *, max_seqlen: int, loss_scale: Tensor, **tensors: Tensor) -> StaticBatch:
        """Make one from its tensors."""
        batch = object.__new__(cls)
        batch._set(**tensors, max_seqlen=max_seqlen, loss_scale=loss_scale, extras={})
        return batch

    @classmethod
    def watching(cls, batch: THDBatch) -> StaticBatch:
        """Make one that tells of reads and answers them, from a real batch."""
        scale = torch.full((), batch.loss_scale, device=batch.input_ids.device)
        tensors = {name: getattr(batch, name) for name in _FIELDS}
        watching = cls.build(max_seqlen=batch.max_seqlen, loss_scale=scale, **tensors)
        watching._set(extras=batch.extras)
        for name in ("lengths", "padded_lengths", "stats", "sequence_ids"):
            THDBatch.__dict__[name].__set__(watching, getattr(batch, name))
        return watching

    def replace(self, **changes: object) -> THDBatch:
        """Return a copy with some tensors changed."""
        names = (*_FIELDS, "max_seqlen", "loss_scale", "extras")
        copy = object.__new__(StaticBatch)
        copy._set(**{name: getattr(self, name) for name in names})
        copy._set(**changes)
        return copy

    def __repr__(self) -> str:
        return f"StaticBatch({self.input_ids.shape[-1]} slots, {self.cu_seqlens.shape[0] - 1} sequences)"


class StaticInputs:
    """The buffers of one bucket.

    Args:
        bucket: their sizes.
        device: where they live.
        axes: rows of ``position_ids``, for M-RoPE; None for one.
        scale_dtype: of ``loss_scale``. fp32, as a Python number is rounded to the tensor it multiplies;
            fp64 for models in fp64.
    """

    def __init__(
        self, bucket: Bucket, device: torch.device, *, axes: int | None, scale_dtype: torch.dtype
    ) -> None:
        self.bucket = bucket
        self.axes = axes
        slots = bucket.slots
        shape = (slots,) if axes is None else (axes, slots)
        self._arange = torch.arange(slots, device=device)
        offsets = torch.zeros(bucket.sequences + 1, dtype=torch.int32, device=device)
        self.batch = StaticBatch.build(
            input_ids=torch.zeros(slots, dtype=torch.int64, device=device),
            targets=torch.full((slots,), IGNORE_INDEX, device=device),
            position_ids=torch.zeros(shape, dtype=torch.int64, device=device),
            cu_seqlens=offsets,
            cu_seqlens_padded=offsets.clone(),
            max_seqlen=bucket.max_seqlen,
            loss_scale=torch.ones((), dtype=scale_dtype, device=device),
        )

    def fill(self, batch: THDBatch) -> None:
        """Copy a batch that fits, without waiting for the device; the tail becomes dummy sequences.

        Offsets are worked out from the lengths the host knows, in page-locked memory.
        """
        static, used, total = self.batch, Layout.of_batch(batch).slots, self.bucket.slots
        real, padded, step = pad_offsets(batch, self.bucket)
        _copy(static.cu_seqlens_padded, padded)
        _copy(static.cu_seqlens, real)
        for name, rest in (("input_ids", 0), ("targets", IGNORE_INDEX)):
            target: Tensor = getattr(static, name)
            target[:used].copy_(getattr(batch, name)[:used], non_blocking=True)
            target[used:].fill_(rest)
        positions = static.position_ids
        positions[..., :used].copy_(batch.position_ids[..., :used], non_blocking=True)
        if total > used:
            positions[..., used:].copy_(torch.remainder(self._arange[: total - used], step))
        static_scale: Any = static.loss_scale
        static_scale.fill_(batch.loss_scale)

    def matches(self, batch: THDBatch) -> bool:
        """Say whether positions have the axes that were captured."""
        return self.axes == (None if batch.position_ids.ndim == 1 else batch.position_ids.shape[0])


def pad_offsets(batch: THDBatch, bucket: Bucket) -> tuple[Tensor, Tensor, int]:
    """Stretch both offsets of a batch to a bucket, from host integers alone.

    Returns:
        int32 ``[S + 1]`` real and padded offsets on the CPU, and the length of a dummy sequence. Lengths
        ``(3, 2)`` in a bucket of 9 slots and 4 sequences give ``[0, 3, 5, 7, 9]`` twice, and 2.
    """
    layout = Layout.of_batch(batch)
    kept = layout.sequences
    lengths, padded_lengths = batch.lengths[:kept], batch.padded_lengths[:kept]
    padded = pad_cu_seqlens(
        cu_seqlens_from_lengths(padded_lengths),
        bucket.sequences,
        bucket.slots,
        max_seqlen=bucket.max_seqlen,
        lengths=padded_lengths,
    )
    tail, spare = bucket.slots - layout.slots, bucket.sequences - kept
    step = max(1, -(-tail // max(spare, 1)))
    if padded_lengths == lengths:
        return padded, padded, step
    real = cu_seqlens_from_lengths(lengths)
    return torch.cat([real, padded[kept + 1 :] - layout.slots + real[-1]]), padded, step


def dummy_batch(layout: Layout, device: torch.device, *, axes: int | None = None) -> THDBatch:
    """Make a batch of token 0 with a target in every slot but the last, for warm-up and measuring.

    Args:
        layout: its size; the sequences are of nearly equal length.
        device: where it lives.
        axes: rows of ``position_ids``, for M-RoPE.
    """
    count = max(1, min(layout.sequences, layout.slots))
    lengths = [layout.slots // count + (i < layout.slots % count) for i in range(count)]
    samples = [{"input_ids": torch.zeros(length, dtype=torch.int64)} for length in lengths]
    batch = THDBatch.collate(samples)
    if axes is not None:
        batch = batch.replace(position_ids=batch.position_ids.expand(axes, -1).contiguous())
    return batch.to(device)


def pad_batch(batch: THDBatch, bucket: Bucket) -> THDBatch:
    """Pad a batch to a bucket, eagerly: what a captured step works on, with everything the host knows.

    Args:
        batch: one that fits.
        bucket: the shape.

    Returns:
        A new batch on the same device, of T slots and S + 1 offsets. The tail has no targets.
    """
    used, device = Layout.of_batch(batch).slots, batch.input_ids.device
    real, padded, _ = pad_offsets(batch, bucket)
    positions = position_ids_from_cu_seqlens(padded, bucket.slots)[used:].to(device)
    tail = positions.shape[0]
    positions = positions.expand(*batch.position_ids.shape[:-1], tail)
    return batch.replace(
        input_ids=torch.nn.functional.pad(batch.input_ids[:used], (0, tail)),
        targets=torch.nn.functional.pad(batch.targets[:used], (0, tail), value=IGNORE_INDEX),
        position_ids=torch.cat([batch.position_ids[..., :used], positions], dim=-1),
        cu_seqlens=real.to(device),
        cu_seqlens_padded=padded.to(device),
        padded_lengths=tuple(torch.diff(padded).tolist()),
        max_seqlen=bucket.max_seqlen,
    )


def _copy(target: Tensor, source: Tensor) -> None:
    if target.is_cuda:
        source = source.pin_memory()
    target.copy_(source, non_blocking=True)
