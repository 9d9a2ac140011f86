"""A batch's sizes -> the bucket (fixed shape) that it fits, or why it fits none; a bucket's buffers.

A bucket has T slots and S sequences. The bucket of a batch is chosen before any copy, without reading
tensors. Dummy sequences without targets fill the slots behind the batch, the bucket's tail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from lightning_thd._checks import host_ints
from lightning_thd.batch import IGNORE_INDEX, THDBatch
from lightning_thd.batch.thd_batch import NOTHING_AROUND
from lightning_thd.batch.upload import Filled, Header
from lightning_thd.boundaries import Boundaries
from lightning_thd.cuda_graph.errors import Report, calling_line, refuse
from lightning_thd.seqlens import position_ids_from_cu_seqlens

Reason = Literal["num_sequences", "tokens", "max_seqlen", "extras"]


class BatchShape(NamedTuple):
    """The sizes of a batch that decide its bucket: slots, sequences, and slots of the longest sequence."""

    slots: int
    sequences: int
    max_seqlen: int

    @classmethod
    def of(cls, padded_lengths: Sequence[int]) -> BatchShape:
        """Return the shape of padded lengths: ``(3, 2, 0)`` gives 5 slots, 2 sequences and the longest 3."""
        num_sequences = len(padded_lengths)
        while num_sequences and padded_lengths[num_sequences - 1] == 0:
            num_sequences -= 1
        longest = max(1, max(padded_lengths, default=1))
        return cls(sum(padded_lengths), num_sequences, longest)

    @classmethod
    def of_batch(cls, batch: THDBatch) -> BatchShape:
        """Return the shape of a batch without its trailing padding, which a bucket's tail replaces."""
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
        covered = self.sequences * self.max_seqlen
        if covered < self.slots:
            raise ValueError(
                f"{self}: {self.sequences} sequences of at most {self.max_seqlen} cover {covered} of "
                f"{self.slots} slots, and a slot of no sequence makes gradients NaN. Give "
                f"sequences={math.ceil(self.slots / self.max_seqlen)} or more."
            )

    def misfit(self, shape: BatchShape) -> Reason | None:
        """Return why a batch of this shape does not fit the bucket, or None if it fits."""
        if shape.slots > self.slots:
            return "tokens"
        if shape.max_seqlen > self.max_seqlen:
            return "max_seqlen"
        dummies = math.ceil((self.slots - shape.slots) / self.max_seqlen)
        if shape.sequences + dummies > self.sequences:
            return "num_sequences"
        return None


def choose(buckets: Sequence[Bucket], batch: THDBatch) -> tuple[Bucket | None, Reason | None]:
    """Return the first bucket that a batch fits, and None; or None, and why the nearest does not fit."""
    if batch.extras:
        return None, "extras"
    shape = BatchShape.of_batch(batch)
    order: tuple[Reason, ...] = ("tokens", "max_seqlen", "num_sequences")  # a later check is nearer to a fit
    nearest: Reason = "tokens"
    for bucket in buckets:
        reason = bucket.misfit(shape)
        if reason is None:
            return bucket, None
        nearest = max(nearest, reason, key=order.index)
    return None, nearest


def make_buckets(max_sequences: Sequence[int], *, slots: int, max_seqlen: int | None = None) -> list[Bucket]:
    """Make one bucket per number of sequences, in ascending order; ``max_seqlen`` defaults to ``slots``."""
    counts = sorted(set(host_ints(max_sequences, "max_sequences", advice="Example: (24, 80).").tolist()))
    if not counts:
        raise ValueError("max_sequences is empty; wanted at least one number, for example (24, 80).")
    if max_seqlen is None:
        max_seqlen = slots
    return [Bucket(slots=slots, sequences=count, max_seqlen=max_seqlen) for count in counts]


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
    """Make a property whose reads are refused; a lint only reports them, and gets the real value."""

    def read(self: StaticBatch) -> Any:
        self._report(f"the step reads batch.{name}, {_ADVICE}", calling_line())
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

    __slots__ = ("_report", "_static", "_watched")

    _report: Report  # takes reads of host values
    _static: StaticBoundaries
    _watched: THDBatch  # the real batch whose host values a lint hands out

    max_targets = None  # not known at capture, because it changes from batch to batch

    @classmethod
    def build(cls, **fields: Any) -> StaticBatch:
        """Build a static batch from its tensors and its ``max_seqlen``."""
        batch = object.__new__(cls)
        batch._set(**{**NOTHING_AROUND, "extras": {}, "weights": None, "_report": refuse, **fields})
        return batch

    @property
    def boundaries(self) -> Boundaries:  # type: ignore[override]
        """Return the boundaries, new ones at every read: a replay computes again what layers ask of them."""
        return self._static.fresh()

    @classmethod
    def watching(cls, batch: THDBatch, report: Report) -> StaticBatch:
        """Build a static batch from a real one; it reports reads of host values, and returns the values."""
        fields = {name: getattr(batch, name) for name in _KEPT if name != "_static"}
        fields["loss_scale"] = torch.full((), batch.loss_scale, device=batch.input_ids.device)
        real = batch.boundaries
        static = StaticBoundaries(
            offsets=real.offsets, slots=real.slots, max_seqlen=real.max_seqlen, real_offsets=real.cu_seqlens
        )
        watching = cls.build(**fields, _static=static, _watched=batch, _report=report)
        for name in _HIDDEN:
            THDBatch.__dict__[name].__set__(watching, getattr(batch, name))
        return watching

    def replace(self, **changes: object) -> Any:
        """Return a copy with some tensors changed."""
        changes.pop("max_targets", None)  # None for all static batches
        if "targets" in changes:
            changes["_targets"] = changes.pop("targets")
        fields = {name: getattr(self, name) for name in (*_KEPT, "_report", "watcher")}
        return StaticBatch.build(**{**fields, **changes})

    def __repr__(self) -> str:
        return f"StaticBatch({self.input_ids.shape[-1]} slots)"


for _name in (*_HIDDEN, *_HIDDEN_LENGTHS, "loss_tokens"):
    setattr(StaticBatch, _name, _refused(_name))


class StaticInputs:
    """The fixed buffers of one bucket, and a ``batch`` of these buffers.

    ``fill`` copies a batch into one row of int32 numbers, with a header; that is one copy for a batch as it
    came to its GPU. ``unpack``, the first part of every graph, computes the batch's tensors from the row.
    """

    def __init__(
        self,
        bucket: Bucket,
        device: torch.device,
        *,
        axes: int | None,  # the number of M-RoPE's position axes, or None
        scale_dtype: torch.dtype,  # fp64 for fp64 models, else fp32
        longest: int,  # sequence of the batch at capture; a table of positions may hold no more
    ) -> None:
        self.bucket = bucket
        self.axes = axes
        self._longest = longest
        self._device = device
        slots = bucket.slots
        self._slots = torch.arange(slots, device=device)

        # Rows of a multiple of 16 bytes, because compiled kernels copy tensors that begin elsewhere.
        count = bucket.sequences + 1
        offsets = torch.zeros(2, _up_to(count, 4), dtype=torch.int32, device=device)
        self._offsets = offsets[:, :count]
        self._entries = torch.arange(count, device=device)

        num_rows = 2 + (axes or 1)  # ids, targets and positions
        rows = torch.zeros(num_rows, _up_to(slots, 2), dtype=torch.int64, device=device)
        self._rows = rows[:, :slots]
        self._blank = torch.zeros(num_rows, 1, dtype=torch.int64, device=device)
        self._blank[1] = IGNORE_INDEX
        self._rows.copy_(self._blank.expand_as(self._rows))

        num_numbers = Header.SIZE + offsets.numel() + num_rows * _up_to(slots, 4)
        self._numbers = torch.zeros(num_numbers, dtype=torch.int32, device=device)
        self.batch = StaticBatch.build(
            input_ids=self._rows[0],
            _targets=self._rows[1],
            position_ids=self._rows[2] if axes is None else self._rows[2:],
            _static=StaticBoundaries(
                offsets=self._offsets[0],
                real_offsets=self._offsets[1],
                slots=slots,
                max_seqlen=bucket.max_seqlen,
            ),
            loss_scale=torch.ones((), dtype=scale_dtype, device=device),
        )

    def dummy(self, shape: BatchShape | None = None) -> THDBatch:
        """Return a batch of token 0 in a shape, by default the bucket's, with targets but at the ends."""
        if shape is None:
            shape = BatchShape(self.bucket.slots, self.bucket.sequences, self.bucket.max_seqlen)
        num_sequences = max(1, min(shape.sequences, shape.slots))
        length, rest = divmod(shape.slots, num_sequences)
        lengths = [length + 1] * rest + [length] * (num_sequences - rest)
        batch = THDBatch.collate([{"input_ids": np.zeros(length, np.int64)} for length in lengths])

        positions = batch.position_ids % self._longest
        if self.axes is not None:
            positions = positions.expand(self.axes, -1).contiguous()
        return batch.replace(position_ids=positions).to(self._device)

    def fill(self, batch: THDBatch) -> None:
        """Copy a batch into the row of numbers, without waiting for the device."""
        sent = batch.buffer()
        if sent is None or len(sent) > len(self._numbers):
            self._lay_out(batch)
        else:
            self._numbers[: len(sent)].copy_(sent, non_blocking=True)

    def _lay_out(self, batch: THDBatch) -> None:
        """Fill the row of numbers from a batch of separate tensors, by a copy of each."""
        shape = BatchShape.of_batch(batch)
        used = shape.slots
        count = shape.sequences
        slots = self.bucket.slots
        filled = Filled(used, count, batch.loss_scale)

        row = self._offsets.stride(0)
        offsets = np.zeros((2, row), np.int32)
        offsets[0, 1 : count + 1] = np.cumsum(batch.padded_lengths[:count], dtype=np.int32)
        offsets[1, 1 : count + 1] = np.cumsum(batch.lengths[:count], dtype=np.int32)

        start = Header.SIZE + offsets.size
        starts = [start + i * slots for i in range(len(self._rows))]
        header = Header.of(filled, offsets=(Header.SIZE, Header.SIZE + row), rows=starts)
        on_host = torch.from_numpy(np.concatenate([header, offsets.ravel()]))
        _copy(self._numbers[:start], on_host)

        rows = self._numbers[start : start + len(self._rows) * slots].view(-1, slots)[:, :used]
        rows[0].copy_(batch.input_ids[:used], non_blocking=True)
        rows[1].copy_(batch.targets[:used], non_blocking=True)
        rows[2:].copy_(batch.position_ids[..., :used], non_blocking=True)

    def unpack(self) -> None:
        """Compute the batch's tensors from the row of numbers; dummy sequences fill the tail."""
        numbers = self._numbers
        scale = cast("Tensor", self.batch.loss_scale)
        scale.copy_(numbers[Header.SCALE : Header.SCALE + 2].view(torch.float64)[0])
        self._unpack_offsets(numbers[Header.SLOTS], numbers[Header.SEQUENCES])
        self._unpack_rows(numbers[Header.SLOTS])

    def _unpack_offsets(self, used: Tensor, count: Tensor) -> None:
        """Write the offsets of the batch, and behind them those of dummies, all of one length but the last.

        Sequences of 3 and 2 tokens give ``[0, 3, 5, 7, 9]`` in a bucket of 4 sequences and 9 slots.
        """
        starts = self._numbers[Header.OFFSETS : Header.OFFSETS + 2, None]
        of_batch = self._numbers[starts + torch.minimum(self._entries, count)]

        tail = self.bucket.slots - used
        num_dummies = self.bucket.sequences - count
        length = (tail + num_dummies - 1) // num_dummies.clamp_min(1)
        of_dummies = torch.minimum((self._entries - count).clamp_min(0) * length, tail)
        self._offsets.copy_(of_batch + of_dummies)

    def _unpack_rows(self, used: Tensor) -> None:
        """Write ids, targets and positions of the batch, and blank ones with positions of dummies behind."""
        is_of_batch = self._slots < used
        starts = self._numbers[Header.ROWS : Header.ROWS + len(self._rows), None]
        of_batch = self._numbers[(starts + torch.where(is_of_batch, self._slots, 0)).clamp_min(0)]
        self._rows.copy_(torch.where(is_of_batch, of_batch, self._blank))

        counted = position_ids_from_cu_seqlens(self._offsets[0], self.bucket.slots)
        were_sent = starts[2:] >= 0  # positions that only count are not sent
        of_sequences = torch.where(were_sent, self._rows[2:], counted)
        of_dummies = counted % self._longest  # a table of positions may end there
        self._rows[2:].copy_(torch.where(is_of_batch, of_sequences, of_dummies))

    def matches(self, batch: THDBatch) -> bool:
        """Return whether a batch has as many position axes as the captured step."""
        axes = None if batch.position_ids.ndim == 1 else batch.position_ids.shape[0]
        return self.axes == axes


def _up_to(number: int, multiple: int) -> int:
    """Return the least multiple that is not below the number."""
    return math.ceil(number / multiple) * multiple


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy a tensor of the host to the device without waiting for the copy."""
    pinned = source.pin_memory() if target.device.type == "cuda" else source
    target.copy_(pinned, non_blocking=True)
