"""A bucket -> tensors of fixed address that any batch which fits is copied into, and the batch a step sees.

T slots and S sequences of the bucket.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_thd.batch import IGNORE_INDEX, THDBatch
from lightning_thd.cuda_graph.buckets import (
    Bucket,
    Layout,
    dummy_batch,
    offsets_of,
    padded_lengths_of,
    real_lengths_of,
)
from lightning_thd.cuda_graph.errors import refuse

_FIELDS = ("input_ids", "targets", "position_ids", "cu_seqlens", "cu_seqlens_padded")
# What the host knows of a batch, and a graph does not.
_HIDDEN = (
    *("lengths", "padded_lengths", "stats", "sequence_ids"),
    *("sequence_shares", "sequence_scale", "token_scale", "microbatch", "set_name"),
)
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
    """The batch a captured step sees: tensors of fixed address; reads of host values raise.

    ``max_seqlen`` is the bucket's, and ``loss_scale`` a tensor ``[]``.
    """

    __slots__ = ()

    max_targets = None  # changes from batch to batch

    @classmethod
    def build(cls, *, max_seqlen: int, loss_scale: Tensor, **fields: Any) -> StaticBatch:
        """Build a static batch from its tensors."""
        batch = object.__new__(cls)
        batch._set(**fields, max_seqlen=max_seqlen, loss_scale=loss_scale, extras={}, weights=None)
        return batch

    @classmethod
    def watching(cls, batch: THDBatch) -> StaticBatch:
        """Build a static batch from a real one that reports reads of host values and answers them."""
        scale = torch.full((), batch.loss_scale, device=batch.input_ids.device)
        tensors = {name: getattr(batch, name) for name in _FIELDS}
        watching = cls.build(max_seqlen=batch.max_seqlen, loss_scale=scale, **tensors)
        watching._set(extras=batch.extras, weights=batch.weights)
        for name in _HIDDEN:
            THDBatch.__dict__[name].__set__(watching, getattr(batch, name))
        return watching

    def replace(self, **changes: object) -> Any:
        """Return a copy with some tensors changed."""
        copy = object.__new__(StaticBatch)
        kept = (*_FIELDS, "max_seqlen", "loss_scale", "extras", "weights")
        copy._set(**{name: getattr(self, name) for name in kept})
        changes.pop("max_targets", None)  # None for all static batches
        copy._set(**changes)
        return copy

    def _real_offsets(self) -> Tensor | None:
        """Return the offsets buffer, since padding of sequences changes from replay to replay."""
        return self.cu_seqlens

    def __repr__(self) -> str:
        return f"StaticBatch({self.input_ids.shape[-1]} slots)"


for _name in (*_HIDDEN, "loss_tokens"):
    setattr(StaticBatch, _name, _refused(_name))


class StaticInputs:
    """The fixed buffers of one bucket, and ``batch``, which is made of them."""

    def __init__(
        self,
        bucket: Bucket,
        device: torch.device,
        *,
        axes: int | None,  # those of M-RoPE, or None
        scale_dtype: torch.dtype,  # fp32 as that of a Python number, fp64 for fp64 models
    ) -> None:
        self.bucket, self.axes = bucket, axes
        self._device, slots = device, bucket.slots
        self._arange = torch.arange(slots, device=device)
        offsets = torch.zeros(bucket.sequences + 1, dtype=torch.int32, device=device)
        self.batch = StaticBatch.build(
            input_ids=torch.zeros(slots, dtype=torch.int64, device=device),
            targets=torch.full((slots,), IGNORE_INDEX, device=device),
            position_ids=torch.zeros(
                (slots,) if axes is None else (axes, slots), dtype=torch.int64, device=device
            ),
            cu_seqlens=offsets,
            cu_seqlens_padded=offsets.clone(),
            max_seqlen=bucket.max_seqlen,
            loss_scale=torch.ones((), dtype=scale_dtype, device=device),
        )

    def dummy(self, layout: Layout | None = None) -> THDBatch:
        """Return a dummy batch of a layout, by default the bucket's own."""
        bucket = self.bucket
        layout = layout or Layout(bucket.slots, bucket.sequences, bucket.max_seqlen)
        return dummy_batch(layout, self._device, axes=self.axes)

    def fill(self, batch: THDBatch) -> None:
        """Copy a batch into the buffers, without waiting for the device; the tail becomes dummy sequences."""
        static, layout = self.batch, Layout.of_batch(batch)
        used, tail = layout.slots, self.bucket.slots - layout.slots
        lengths = padded_lengths_of(batch, self.bucket)
        _copy(static.cu_seqlens_padded, offsets_of(lengths))
        _copy(static.cu_seqlens, offsets_of(real_lengths_of(batch, lengths)))
        for name, rest in (("input_ids", 0), ("targets", IGNORE_INDEX)):
            target: Tensor = getattr(static, name)
            target[:used].copy_(getattr(batch, name)[:used], non_blocking=True)
            target[used:].fill_(rest)
        static.position_ids[..., :used].copy_(batch.position_ids[..., :used], non_blocking=True)
        if tail:  # dummies are as long as the first of them, but for the last
            positions = torch.remainder(self._arange[:tail], int(lengths[layout.sequences]))
            static.position_ids[..., used:].copy_(positions, non_blocking=True)
        static_scale: Any = static.loss_scale
        static_scale.fill_(batch.loss_scale)

    def matches(self, batch: THDBatch) -> bool:
        """Return whether a batch has the position axes that were captured."""
        return self.axes == (None if batch.position_ids.ndim == 1 else batch.position_ids.shape[0])


def _copy(target: Tensor, source: Tensor) -> None:
    pinned = source.pin_memory() if target.device.type == "cuda" else source
    target.copy_(pinned, non_blocking=True)
