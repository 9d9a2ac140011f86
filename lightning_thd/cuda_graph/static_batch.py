"""A bucket -> tensors of fixed address that any batch which fits is copied into, and the batch a step sees.

T slots and S sequences of the bucket.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_thd.batch import IGNORE_INDEX, THDBatch
from lightning_thd.cuda_graph.buckets import (
    Bucket,
    Ints,
    Layout,
    dummy_batch,
    offsets_of,
    padded_lengths_of,
    real_lengths_of,
)
from lightning_thd.cuda_graph.errors import refuse
from lightning_thd.cuda_graph.static_shard import Cut, StaticShardLayout
from lightning_thd.parallel.context import partition
from lightning_thd.parallel.shard import THDShard

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
    _kept: tuple[str, ...] = (*_FIELDS, "max_seqlen", "loss_scale", "extras", "weights")

    @classmethod
    def build(cls, *, max_seqlen: int, loss_scale: Tensor, **fields: Any) -> StaticBatch:
        """Build a static batch from its tensors; a ``StaticShard`` takes a ``layout``, too."""
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
        copy = object.__new__(type(self))
        copy._set(**{name: getattr(self, name) for name in self._kept})
        changes.pop("max_targets", None)  # None for all static batches
        copy._set(**changes)
        return copy

    def _real_offsets(self) -> Tensor | None:
        """Return the offsets buffer, since padding of sequences changes from replay to replay."""
        return self.cu_seqlens

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.input_ids.shape[-1]} slots)"


for _name in (*_HIDDEN, "loss_tokens"):
    setattr(StaticBatch, _name, _refused(_name))


class StaticShard(StaticBatch, THDShard):
    """The shard that a captured step sees under context parallelism, with a layout made of fixed buffers."""

    __slots__ = ()

    _kept = (*StaticBatch._kept, "layout")


class StaticInputs:
    """The fixed buffers of one bucket, and ``batch``, which is made of them."""

    def __init__(
        self,
        bucket: Bucket,
        device: torch.device,
        *,
        axes: int | None,  # those of M-RoPE, or None
        scale_dtype: torch.dtype,  # fp32 as that of a Python number, fp64 for fp64 models
        cut: Cut | None = None,
        asked: dict[Any, Any] | None = None,  # what attention has asked other buffers of these shapes for
    ) -> None:
        self.bucket, self.axes, self.cut = bucket, axes, cut
        self._device = device
        self._slots = slots = bucket.slots // (1 if cut is None else cut.cp)
        self._arange = torch.arange(slots, device=device)
        offsets = torch.zeros(bucket.sequences + 1, dtype=torch.int32, device=device)
        fields: dict[str, Any] = {"cu_seqlens_padded": offsets.clone()}
        self.layout: StaticShardLayout | None = None
        if cut is not None:
            self.layout = StaticShardLayout(bucket, cut, device, {} if asked is None else asked)
            fields = {"cu_seqlens_padded": self.layout.offsets(), "layout": self.layout}
        self.batch = (StaticBatch if cut is None else StaticShard).build(
            input_ids=torch.zeros(slots, dtype=torch.int64, device=device),
            targets=torch.full((slots,), IGNORE_INDEX, device=device),
            position_ids=torch.zeros(
                (slots,) if axes is None else (axes, slots), dtype=torch.int64, device=device
            ),
            cu_seqlens=offsets,
            max_seqlen=bucket.max_seqlen if cut is None else bucket.max_seqlen // cut.cp,
            loss_scale=torch.ones((), dtype=scale_dtype, device=device),
            **fields,
        )

    def known(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which attention finds the shard layout, if any, of these buffers."""
        return contextlib.nullcontext() if self.layout is None else self.layout.known()

    def dummy(self, layout: Layout | None = None) -> THDBatch:
        """Return a dummy batch of a layout, by default the bucket's own."""
        bucket = self.bucket
        layout = layout or Layout(bucket.slots, bucket.sequences, bucket.max_seqlen)
        if self.cut is not None:
            return self.cut.dummy(layout, self._device, axes=self.axes)
        return dummy_batch(layout, self._device, axes=self.axes)

    def fill(self, batch: THDBatch) -> None:
        """Copy a batch into the buffers, without waiting for the device; the tail becomes dummy sequences."""
        static, used, total = self.batch, Layout.of_batch(batch).slots, self._slots
        if self.cut is not None:
            used //= self.cut.cp  # its sequences come first in a shard, too
        positions = self._fill_offsets(batch, used)
        for name, rest in (("input_ids", 0), ("targets", IGNORE_INDEX)):
            target: Tensor = getattr(static, name)
            target[:used].copy_(getattr(batch, name)[:used], non_blocking=True)
            target[used:].fill_(rest)
        static.position_ids[..., :used].copy_(batch.position_ids[..., :used], non_blocking=True)
        if total > used:
            static.position_ids[..., used:].copy_(positions, non_blocking=True)
        static_scale: Any = static.loss_scale
        static_scale.fill_(batch.loss_scale)

    def _fill_offsets(self, batch: THDBatch, used: int) -> Tensor:
        """Copy offsets and indices into their buffers and return the positions of the tail."""
        static, cut = self.batch, self.cut
        if cut is None:
            lengths = padded_lengths_of(batch, self.bucket)
            _copy(static.cu_seqlens_padded, offsets_of(lengths))
            _copy(static.cu_seqlens, offsets_of(real_lengths_of(batch, lengths)))
            kept = Layout.of_batch(batch).sequences
            # Dummies are as long as the first of them, but for the last.
            step = int(lengths[kept]) if kept < len(lengths) else 1
            return torch.remainder(self._arange[: self._slots - used], max(1, step))
        assert self.layout is not None
        assert isinstance(batch, THDShard)
        batch.layout.used = self.layout.used  # by the captured step, on behalf of this batch
        lengths = padded_lengths_of(batch, self.bucket, multiple=cut.multiple)
        for target, source in self.layout.refill(lengths):
            _copy(target, source)
        real = partition.held_real_lengths(
            real_lengths_of(batch, lengths).tolist(),
            lengths.tolist(),
            cp=cut.cp,
            rank=cut.rank,
            layout="dual_chunk",
        )
        _copy(static.cu_seqlens, offsets_of(real))
        return _pinned(torch.from_numpy(_positions(lengths, cut)[used:]), self._device)

    def matches(self, batch: THDBatch) -> bool:
        """Return whether a batch has the position axes and the context-parallel cut that were captured."""
        axes = None if batch.position_ids.ndim == 1 else batch.position_ids.shape[0]
        return self.axes == axes and self.cut == Cut.of(batch)


def _positions(padded_lengths: Ints, cut: Cut) -> Ints:
    """Return int64 ``[N]``, the position of every slot of a shard in its sequence."""
    pieces = partition.pieces_of_rank(padded_lengths.tolist(), cp=cut.cp, rank=cut.rank, layout="dual_chunk")
    positions: Ints = partition.ranges(pieces.start, pieces.stop).astype(np.int64)
    return positions


def _pinned(source: Tensor, device: torch.device) -> Tensor:
    return source.pin_memory() if device.type == "cuda" else source


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(_pinned(source, target.device), non_blocking=True)
