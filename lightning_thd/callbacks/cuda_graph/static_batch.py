"""A bucket -> tensors of fixed address that any batch which fits is copied into, and the batch a step sees.

T slots and S sequences of the bucket, t and s of the batch.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_thd.batch import IGNORE_INDEX, THDBatch
from lightning_thd.callbacks.cuda_graph.buckets import Bucket, Layout
from lightning_thd.callbacks.cuda_graph.errors import CaptureError, calling_line
from lightning_thd.seqlens import cu_seqlens_from_lengths, pad_cu_seqlens, position_ids_from_cu_seqlens

_FIELDS = ("input_ids", "targets", "position_ids", "cu_seqlens", "cu_seqlens_padded")


def _refuse(name: str) -> NoReturn:
    raise CaptureError(
        f"the step reads batch.{name}, which the host knows and which changes from batch to batch; a captured "
        "step would go on with the value of the batch it was captured on. Use the tensors of the batch "
        "(cu_seqlens, targets, loss_scale), or move this to on_train_batch_start.",
        calling_line(),
    )


def _refused(name: str) -> property:
    return property(lambda self: _refuse(name))


class StaticBatch(THDBatch):
    """The batch a captured step sees: tensors of fixed address; what only the host knows raises.

    ``max_seqlen`` is the bucket's, and ``loss_scale`` a tensor ``[]``.
    """

    __slots__ = ()

    lengths = _refused("lengths")  # type: ignore[assignment]
    padded_lengths = _refused("padded_lengths")  # type: ignore[assignment]
    stats = _refused("stats")  # type: ignore[assignment]
    sequence_ids = _refused("sequence_ids")  # type: ignore[assignment]
    loss_tokens = _refused("loss_tokens")  # type: ignore[assignment]

    @classmethod
    def build(cls, *, max_seqlen: int, loss_scale: Tensor, **tensors: Tensor) -> StaticBatch:
        """Make one from its tensors."""
        batch = object.__new__(cls)
        batch._set(**tensors, max_seqlen=max_seqlen, loss_scale=loss_scale, extras={})
        return batch

    def replace(self, **changes: object) -> THDBatch:
        """Return a copy with some tensors changed."""
        names = (*_FIELDS, "max_seqlen", "loss_scale", "extras")
        copy = object.__new__(StaticBatch)
        copy._set(**{name: getattr(self, name) for name in names})
        copy._set(**changes)
        return copy

    def unpack(self, x: Tensor) -> list[Tensor]:
        """Refuse: the sizes change from batch to batch."""
        _refuse("unpack()")

    def __len__(self) -> int:
        _refuse("__len__()")

    def __iter__(self) -> Any:
        _refuse("__iter__()")

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
        offsets = {"dtype": torch.int32, "device": device}
        self.batch = StaticBatch.build(
            input_ids=torch.zeros(slots, dtype=torch.int64, device=device),
            targets=torch.full((slots,), IGNORE_INDEX, device=device),
            position_ids=torch.zeros(shape, dtype=torch.int64, device=device),
            cu_seqlens=torch.zeros(bucket.sequences + 1, **offsets),  # type: ignore[arg-type]
            cu_seqlens_padded=torch.zeros(bucket.sequences + 1, **offsets),  # type: ignore[arg-type]
            max_seqlen=bucket.max_seqlen,
            loss_scale=torch.ones((), dtype=scale_dtype, device=device),
        )

    def fill(self, batch: THDBatch) -> None:
        """Copy a batch that fits, without waiting for the device; the tail becomes dummy sequences.

        Offsets are worked out from the lengths the host knows, in page-locked memory.
        """
        static, used, total = self.batch, Layout.of(batch.padded_lengths).slots, self.bucket.slots
        real, padded, step = pad_offsets(batch, self.bucket)
        _copy(static.cu_seqlens_padded, padded)
        _copy(static.cu_seqlens, real)
        for name, rest in (("input_ids", 0), ("targets", IGNORE_INDEX)):
            target: Tensor = getattr(static, name)
            target[:used].copy_(getattr(batch, name), non_blocking=True)
            target[used:].fill_(rest)
        positions = static.position_ids
        positions[..., :used].copy_(batch.position_ids, non_blocking=True)
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
    layout = Layout.of(batch.padded_lengths)
    kept = layout.sequences
    padded = pad_cu_seqlens(
        cu_seqlens_from_lengths(batch.padded_lengths[:kept]),
        bucket.sequences,
        bucket.slots,
        max_seqlen=bucket.max_seqlen,
        lengths=batch.padded_lengths[:kept],
    )
    tail, spare = bucket.slots - layout.slots, bucket.sequences - kept
    step = -(-tail // max(spare, 1))
    if batch.padded_lengths[: len(batch.lengths)] == batch.lengths:
        return padded, padded, max(step, 1)
    lengths = [*batch.lengths, *batch.padded_lengths[len(batch.lengths) :]][:kept]
    real = cu_seqlens_from_lengths(lengths)
    return torch.cat([real, padded[kept + 1 :] - layout.slots + real[-1]]), padded, max(step, 1)


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
    layout, device = Layout.of(batch.padded_lengths), batch.input_ids.device
    real, padded, _ = pad_offsets(batch, bucket)
    positions = position_ids_from_cu_seqlens(padded, bucket.slots)[layout.slots :].to(device)
    tail = positions.shape[0]
    positions = positions.expand(*batch.position_ids.shape[:-1], tail)
    return batch.replace(
        input_ids=torch.nn.functional.pad(batch.input_ids, (0, tail)),
        targets=torch.nn.functional.pad(batch.targets, (0, tail), value=IGNORE_INDEX),
        position_ids=torch.cat([batch.position_ids, positions], dim=-1),
        cu_seqlens=real.to(device),
        cu_seqlens_padded=padded.to(device),
        padded_lengths=tuple(torch.diff(padded).tolist()),
        max_seqlen=bucket.max_seqlen,
    )


def _copy(target: Tensor, source: Tensor) -> None:
    if target.is_cuda:
        source = source.pin_memory()
    target.copy_(source, non_blocking=True)
