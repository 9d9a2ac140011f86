"""A batch's sizes -> the bucket (fixed shape) that it fits, or why it fits none; a bucket's buffers.

A bucket has T slots and S sequences. The bucket of a batch is chosen before any copy, without reading
tensors. Dummy sequences without targets fill the slots behind the batch, the bucket's tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_thd._checks import host_ints
from lightning_thd.batch import IGNORE_INDEX, THDBatch
from lightning_thd.boundaries import Boundaries
from lightning_thd.cuda_graph.errors import refuse

Offsets = npt.NDArray[np.int32]
Reason = Literal["num_sequences", "tokens", "max_seqlen", "extras"]


class Layout(NamedTuple):
    """The sizes of a batch that decide its bucket: slots, sequences, and slots of the longest sequence."""

    slots: int
    sequences: int
    max_seqlen: int

    @classmethod
    def of(cls, padded_lengths: Sequence[int]) -> Layout:
        """Return the layout of padded lengths: ``(3, 2, 0)`` gives 5 slots, 2 sequences and the longest 3."""
        count = len(padded_lengths)
        while count and padded_lengths[count - 1] == 0:
            count -= 1
        return cls(sum(padded_lengths), count, max(1, max(padded_lengths, default=1)))

    @classmethod
    def of_batch(cls, batch: THDBatch) -> Layout:
        """Return the layout of a batch without its trailing padding, which a bucket's tail replaces."""
        return cls.of(batch.boundaries.filled_lengths)


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Bucket:
    """A fixed shape for which steps are captured."""

    slots: int  # T, to which every batch is padded
    sequences: int  # S, the entries of cu_seqlens minus one
    max_seqlen: int  # the longest sequence that the kernels allow; at most ``slots``

    def __post_init__(self) -> None:
        for name in ("slots", "sequences", "max_seqlen"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"Bucket({name}={value!r}): wanted an int of at least 1.")
        if self.max_seqlen > self.slots:
            object.__setattr__(self, "max_seqlen", self.slots)
        if self.sequences * self.max_seqlen < self.slots:
            raise ValueError(
                f"{self}: {self.sequences} sequences of at most {self.max_seqlen} cover "
                f"{self.sequences * self.max_seqlen} of {self.slots} slots, and a slot of no sequence makes "
                f"gradients NaN. Give sequences={-(-self.slots // self.max_seqlen)} or more."
            )

    def misfit(self, layout: Layout) -> Reason | None:
        """Return why a batch of this layout does not fit the bucket, or None if it fits."""
        if layout.slots > self.slots:
            return "tokens"
        if layout.max_seqlen > self.max_seqlen:
            return "max_seqlen"
        dummies = -(-(self.slots - layout.slots) // self.max_seqlen)
        return "num_sequences" if layout.sequences + dummies > self.sequences else None


def choose(buckets: Sequence[Bucket], batch: THDBatch) -> tuple[Bucket | None, Reason | None]:
    """Return the first bucket that a batch fits, and None; or None, and why the nearest does not fit."""
    if batch.extras:
        return None, "extras"
    layout = Layout.of_batch(batch)
    order: tuple[Reason, ...] = ("tokens", "max_seqlen", "num_sequences")  # a later check is nearer to a fit
    nearest: Reason = "tokens"
    for bucket in buckets:
        reason = bucket.misfit(layout)
        if reason is None:
            return bucket, None
        nearest = max(nearest, reason, key=order.index)
    return None, nearest


def make_buckets(max_sequences: Sequence[int], *, slots: int, max_seqlen: int | None = None) -> list[Bucket]:
    """Make one bucket per number of sequences, in ascending order; ``max_seqlen`` defaults to ``slots``."""
    counts = sorted(set(host_ints(max_sequences, "max_sequences", advice="Example: (24, 80).").tolist()))
    if not counts:
        raise ValueError("max_sequences is empty; wanted at least one number, for example (24, 80).")
    longest = slots if max_seqlen is None else max_seqlen
    return [Bucket(slots=slots, sequences=s, max_seqlen=longest) for s in counts]


def bucket_offsets(batch: THDBatch, bucket: Bucket) -> Offsets:
    """Return a batch's offsets in a bucket that it fits, with the tail's dummies: int32 ``[2, S + 1]``.

    Row 0 has the offsets in memory, as ``pad_cu_seqlens`` makes them, and row 1 the cumulative real lengths.
    Sequences of 3 and 2 tokens give ``[0, 3, 5, 7, 9]`` twice in a bucket of 4 sequences and 9 slots.
    """
    count = Layout.of_batch(batch).sequences
    kept = batch.padded_lengths[:count]
    used = sum(kept)
    tail, spare = bucket.slots - used, bucket.sequences - count
    offsets = np.zeros((2, bucket.sequences + 1), np.int32)
    offsets[0, 1 : count + 1] = np.cumsum(kept, dtype=np.int32)
    if spare:
        length = -(-tail // spare)
        offsets[0, count + 1 :] = np.minimum(used + length * np.arange(1, spare + 1), bucket.slots)
    if kept == batch.lengths[:count]:
        offsets[1] = offsets[0]
    else:
        dummies = np.diff(offsets[0, count:])
        offsets[1, 1:] = np.cumsum(np.concatenate([batch.lengths[:count], dummies]))
    return offsets


# The fields that a captured step may read.
_KEPT = ("input_ids", "_targets", "position_ids", "_static", "loss_scale", "extras", "weights")
# The host fields of a batch, which a graph cannot update.
_HIDDEN = (
    *("stats", "sequence_ids", "sequence_shares", "sequence_scale"),
    *("token_scale", "microbatch", "set_name", "roles"),
)
_HIDDEN_LENGTHS = ("lengths", "padded_lengths")  # properties, which read ``boundaries``
_ADVICE = (
    "which the host knows and which changes from batch to batch; a captured step would keep the value of "
    "the batch at its capture. Use the tensors of the batch (cu_seqlens, targets, loss_scale), or "
    "move this to on_train_batch_start."
)


def _refused(name: str) -> property:
    def read(self: StaticBatch) -> Any:
        refuse(f"the step reads batch.{name}, {_ADVICE}")
        if name in _HIDDEN:  # reached only in lint_capture, which stores the value
            return THDBatch.__dict__[name].__get__(self)
        return getattr(self._watched, name)

    return property(read)


class StaticBoundaries(Boundaries):
    """The boundaries of a step that is recorded: offsets with fixed addresses, which replays overwrite.

    Padding inside sequences is possible in every batch. ``lengths`` are those of a real batch, for a lint
    that reports their reads; None in a captured step.
    """

    __slots__ = ()

    def fresh(self) -> StaticBoundaries:
        """Return the boundaries without values that layers computed, which must be recorded too."""
        return self.with_tensors({})


class StaticBatch(THDBatch):
    """A batch of tensors with fixed addresses; except for ``max_seqlen``, reads of host values raise."""

    __slots__ = ("_static", "_watched")

    _static: StaticBoundaries
    _watched: THDBatch  # the real batch whose host values a lint hands out

    max_targets = None  # not known at capture, because it changes from batch to batch

    @classmethod
    def build(cls, **fields: Any) -> StaticBatch:
        """Build a static batch from its tensors and its ``max_seqlen``."""
        batch = object.__new__(cls)
        batch._set(**{"extras": {}, "weights": None, **fields})
        return batch

    @property
    def boundaries(self) -> Boundaries:  # type: ignore[override]
        """Return the boundaries, new ones at every read: a replay computes again what layers ask of them."""
        return self._static.fresh()

    @classmethod
    def watching(cls, batch: THDBatch) -> StaticBatch:
        """Build a static batch from a real one; it reports reads of host values, and returns the values."""
        fields = {name: getattr(batch, name) for name in _KEPT if name != "_static"}
        scale = torch.full((), batch.loss_scale, device=batch.input_ids.device)
        real = batch.boundaries
        static = StaticBoundaries(
            offsets=real.offsets, slots=real.slots, max_seqlen=real.max_seqlen, real_offsets=real.cu_seqlens
        )
        watching = cls.build(**{**fields, "loss_scale": scale, "_static": static, "_watched": batch})
        for name in _HIDDEN:
            THDBatch.__dict__[name].__set__(watching, getattr(batch, name))
        return watching

    def replace(self, **changes: object) -> Any:
        """Return a copy with some tensors changed."""
        changes.pop("max_targets", None)  # None for all static batches
        if "targets" in changes:
            changes["_targets"] = changes.pop("targets")
        return StaticBatch.build(**{**{name: getattr(self, name) for name in _KEPT}, **changes})

    def __repr__(self) -> str:
        return f"StaticBatch({self.input_ids.shape[-1]} slots)"


for _name in (*_HIDDEN, *_HIDDEN_LENGTHS, "loss_tokens"):
    setattr(StaticBatch, _name, _refused(_name))


class StaticInputs:
    """The fixed buffers of one bucket, and a ``batch`` of these buffers."""

    def __init__(
        self,
        bucket: Bucket,
        device: torch.device,
        *,
        axes: int | None,  # the number of M-RoPE's position axes, or None
        scale_dtype: torch.dtype,  # fp64 for fp64 models, else fp32
        longest: int,  # sequence of the batch at capture; a table of positions may hold no more
    ) -> None:
        self.bucket, self.axes, self._longest = bucket, axes, longest
        self._device, slots = device, bucket.slots
        self._arange = torch.arange(slots, device=device)
        count = bucket.sequences + 1
        # Rows of a multiple of 16 bytes, because compiled kernels copy offsets that begin elsewhere.
        rows = torch.zeros(2, -(-count // 4) * 4, dtype=torch.int32, device=device)
        self._offsets = rows[:, :count]
        self.batch = StaticBatch.build(
            input_ids=torch.zeros(slots, dtype=torch.int64, device=device),
            _targets=torch.full((slots,), IGNORE_INDEX, device=device),
            position_ids=torch.zeros(
                (slots,) if axes is None else (axes, slots), dtype=torch.int64, device=device
            ),
            _static=StaticBoundaries(
                offsets=self._offsets[0],
                real_offsets=self._offsets[1],
                slots=slots,
                max_seqlen=bucket.max_seqlen,
            ),
            loss_scale=torch.ones((), dtype=scale_dtype, device=device),
        )

    def dummy(self, layout: Layout | None = None) -> THDBatch:
        """Return a batch of token 0 in a layout, by default the bucket's, with targets but at the ends."""
        layout = layout or Layout(self.bucket.slots, self.bucket.sequences, self.bucket.max_seqlen)
        count = max(1, min(layout.sequences, layout.slots))
        lengths = [layout.slots // count + (i < layout.slots % count) for i in range(count)]
        batch = THDBatch.collate([{"input_ids": np.zeros(length, np.int64)} for length in lengths])
        one = batch.position_ids % self._longest
        positions = one if self.axes is None else one.expand(self.axes, -1).contiguous()
        return batch.replace(position_ids=positions).to(self._device)

    def fill(self, batch: THDBatch) -> None:
        """Copy a batch into the buffers without waiting for the device; dummy sequences fill the tail."""
        static, layout = self.batch, Layout.of_batch(batch)
        used, tail = layout.slots, self.bucket.slots - layout.slots
        offsets = bucket_offsets(batch, self.bucket)
        _copy(self._offsets, torch.from_numpy(offsets))
        sources = (static.input_ids, batch.input_ids, 0), (static.targets, batch.targets, IGNORE_INDEX)
        for target, source, blank in sources:
            target[:used].copy_(source[:used], non_blocking=True)
            if tail:
                target[used:].fill_(blank)
        static.position_ids[..., :used].copy_(batch.position_ids[..., :used], non_blocking=True)
        if tail:  # all dummies are as long as the first, but the last may be shorter
            first = layout.sequences
            longest = min(int(offsets[0, first + 1] - offsets[0, first]), self._longest)
            static.position_ids[..., used:].copy_(self._arange[:tail] % longest)
        cast("Tensor", static.loss_scale).fill_(batch.loss_scale)

    def matches(self, batch: THDBatch) -> bool:
        """Return whether a batch has as many position axes as the captured step."""
        return self.axes == (None if batch.position_ids.ndim == 1 else batch.position_ids.shape[0])


def _copy(target: Tensor, source: Tensor) -> None:
    pinned = source.pin_memory() if target.device.type == "cuda" else source
    target.copy_(pinned, non_blocking=True)
