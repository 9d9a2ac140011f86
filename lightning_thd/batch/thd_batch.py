"""Samples of varying length -> one ``THDBatch``: rows laid end to end, and their lengths on the host.

T slots in a pack, S sequences. Collation keeps on the host every integer that a kernel or a counter needs.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, NoReturn, Self, cast

import numpy as np
import torch
from torch import Tensor

from lightning_thd._checks import as_tensor, choice, described, flags, host_ints, instance
from lightning_thd.alignment import Alignment
from lightning_thd.batch.collate import check_samples, lay_out, padded_fields
from lightning_thd.batch.keys import IGNORE_INDEX
from lightning_thd.batch.prefixes import lay_out_shared, prefixes_of
from lightning_thd.batch.upload import Arrived, Filled, PinnedBatch, version
from lightning_thd.boundaries import Boundaries
from lightning_thd.boundaries.core import Immutable, PredictionRows, checked_device
from lightning_thd.seqlens import seq_idx_from_cu_seqlens
from lightning_thd.stats import SeqStats, Vision, Window

_TENSORS = ("input_ids", "targets", "position_ids", "weights")
_FIELDS = (
    *_TENSORS,
    "boundaries",
    "stats",
    "sequence_ids",
    "loss_scale",
    "extras",
    "sequence_shares",
    "sequence_scale",
    "token_scale",
    "microbatch",
    "set_name",
    "max_targets",
    "roles",
)
_ROUNDING = 1e-9  # a weight is rounded to a whole number if their relative difference is at most this


TO_A_MODEL = "Write model(**batch.hf_kwargs()) for outputs, or causal_lm_loss(model, batch) for the loss"
_NO_TENSOR = f"It is no tensor. {TO_A_MODEL}"
# What people ask a batch for -> what to write instead.
_INSTEAD = {
    "labels": "batch.targets holds the next token of each slot, already shifted. causal_lm_loss(model, "
    "batch) reads it",
    "attention_mask": "A pack has no mask: batch.boundaries holds where each sequence begins. A model with "
    "attn_implementation='thd' keeps sequences apart",
    **dict.fromkeys(("shape", "size", "device", "dtype", "dim", "ndim"), _NO_TENSOR),
}


class _Rows(Tensor):
    """A meta tensor whose ``size(0)`` is a weight, not always a whole number."""

    weight: float

    def size(self, dim: int | None = None) -> Any:
        """Return the weight as the number of rows; a real shape could only be a whole number."""
        if dim is None:
            return super().size()
        # Lightning adds this to an integer tensor. A sum with a float has the default dtype. "bf16-true"
        # and "16-true" make that half precision, in which counts of tokens stop growing or overflow.
        half = torch.get_default_dtype().itemsize < 4
        return torch.tensor(self.weight, dtype=torch.float32) if half else self.weight


def weighing_rows(weight: float) -> Tensor:
    """Return a meta tensor whose ``size(0)`` is the weight; Lightning takes it as the batch size."""
    nearest = round(weight)
    rows: Any = torch.empty(nearest, device="meta").as_subclass(_Rows)
    rows.weight = weight
    if abs(weight - nearest) <= _ROUNDING * weight:
        rows.weight = float(nearest)
    tensor: Tensor = rows
    return tensor


def epoch_weight(batch: THDBatch) -> float:
    """Return the weight of a batch's logged values in epoch means."""
    if batch.roles is not None:  # the loss is a mean over queries
        scale = batch.sequence_scale
    elif "labels" in batch.extras:  # the loss is a mean over sequences, so their number is the weight
        return float(len(batch.lengths))
    else:  # with 1 / loss_scale, the epoch mean of causal_lm_loss is the exact mean over all loss tokens
        scale = batch.loss_scale

    # The mean of the losses of ranks that share a pack is the pack's loss, so all give the pack's weight.
    return batch.boundaries.ranks / scale if scale else 0.0


def rows_of_slots(x: Any, slots: int) -> Tensor:
    """Return ``[T, ...]`` from ``[T, ...]`` or ``[1, T, ...]``, without a check of the number of rows."""
    if isinstance(x, np.ndarray) and x.dtype.kind in "biufc":
        x = as_tensor(x)
    if not isinstance(x, Tensor):
        raise TypeError(f"unpack() got {described(x)}; wanted a tensor with one row per slot.")
    if x.ndim < 2 or x.shape[0] != 1:
        return x
    if slots == 1 and not (x.ndim > 2 and x.shape[1] == 1):
        return x  # with one slot, [1, V] has one row per slot already, but [1, 1, V] is a model's output
    return x[0]


class Predictions(NamedTuple):
    """The predictions of a batch's slots: one row per distinct pair of slot and target, ``[R]`` each.

    ``slots`` are in ascending order; ``weights`` are sums over all tokens of a row.
    """

    slots: Tensor
    targets: Tensor
    weights: Tensor


class Packed(Immutable):
    """What a dataloader gives a rank at once: one pack (``THDBatch``), or those of a step (``THDStep``)."""

    __slots__ = ()

    @property
    def packs(self) -> tuple[THDBatch, ...]:
        """Return the packs in the order in which they run."""
        raise NotImplementedError

    @property
    def agreed(self) -> tuple[float, ...]:
        """Return what must be equal on all ranks that train together."""
        raise NotImplementedError

    def in_step(self) -> THDStep:
        """Return a step of these packs."""
        raise NotImplementedError

    def each(self, function: Callable[[THDBatch], THDBatch]) -> Self:
        """Return a copy with the results of a function in place of the packs."""
        raise NotImplementedError


class _Around(Packed):
    """Base of batches: what belongs to a batch, but is neither pickled nor replaced with its fields."""

    __slots__ = ("_arrived", "_pinned", "_step", "watcher")

    _arrived: Arrived | None  # the buffer in which the tensors came to a GPU
    _pinned: PinnedBatch | None  # a second copy of the tensors in page-locked memory, if there is one
    _step: tuple[weakref.ref[THDStep], int] | None  # the step that holds the batch, and its place in it
    watcher: Any  # receives the losses of the batch's slots: a ``loss.watch.Watcher``, or None


# What is around a new batch.
NOTHING_AROUND: Final = MappingProxyType(dict.fromkeys(_Around.__slots__))


class THDBatch(_Around):
    """One microbatch: sequences laid end to end in one row of T slots.

    Attributes:
        input_ids: int64 ``[T]``.
        targets: int64 ``[T]``, the next token of the same sequence, else -100.
        position_ids: int64 ``[T]``, or ``[3, T]`` for M-RoPE; the samples' own, else counted from 0.
        boundaries: where every sequence begins, for layers and kernels; the next five are read from it.
        cu_seqlens: int32 ``[S + 1]``, cumulative real lengths.
        cu_seqlens_padded: int32 ``[S + 1]``, offsets in memory, last entry T. A trailing pad counts in S.
        lengths: real length of every sequence, on the host, without a trailing pad.
        padded_lengths: slots of every entry of ``cu_seqlens_padded``, on the host, a trailing pad included.
        max_seqlen: longest entry of ``padded_lengths``, at least 1.
        stats: counts of the batch's tokens, slots and sequences, as integers on the host.
        sequence_ids: dataset index of every sequence in ``lengths``.
        loss_scale: data-parallel ranks x microbatches / loss tokens (or their weight) of the whole step. A
            batch that belongs to no step has 1 / its loss tokens, so ``sum * loss_scale`` is the mean.
        extras: extra model inputs, such as ``pixel_values``.
        weights: fp32 ``[T]``, the loss weight of each slot's target; None if no sample has weights.
        sequence_shares: for every sequence in ``lengths``, its weight / the weight of all its loss tokens.
        sequence_scale: like ``loss_scale``, for the weight of the step's sequences; None if unknown.
        token_scale: like ``loss_scale``, for input tokens; 0 turns off router losses except "microbatch".
        microbatch: the batch's index among this rank's microbatches of the step, from 0.
        set_name: the name of the batch's data set, such as ``"code"``; empty if there is only one set.
        max_targets: an upper bound of the slots with a target; None if unknown, as after ``targets`` changed.
        roles: for every sequence in ``lengths``, 0 for a query, 1 for a positive and 2 for a negative of the
            query before it; None for sequences that belong to no query.
    """

    __slots__ = tuple("_targets" if name == "targets" else name for name in _FIELDS)

    input_ids: Tensor
    _targets: Tensor | None
    position_ids: Tensor
    boundaries: Boundaries
    stats: SeqStats
    sequence_ids: tuple[int, ...]
    loss_scale: float
    extras: dict[str, Tensor]
    weights: Tensor | None
    sequence_shares: tuple[float, ...]
    sequence_scale: float | None
    token_scale: float | None
    microbatch: int
    set_name: str
    max_targets: int | None
    roles: tuple[int, ...] | None

    def __init__(
        self,
        *,
        input_ids: Tensor,
        targets: Tensor | None,
        position_ids: Tensor,
        boundaries: Boundaries,
        stats: SeqStats,
        sequence_ids: Sequence[int],
        loss_scale: float,
        extras: dict[str, Tensor] | None = None,
        weights: Tensor | None = None,
        sequence_shares: Sequence[float] = (),
        sequence_scale: float | None = None,
        token_scale: float | None = None,
        microbatch: int = 0,
        set_name: str = "",
        max_targets: int | None = None,
        roles: Sequence[int] | None = None,
    ) -> None:
        self._set(
            input_ids=input_ids,
            _targets=targets,
            position_ids=position_ids,
            boundaries=boundaries,
            stats=stats,
            sequence_ids=tuple(sequence_ids),
            loss_scale=float(loss_scale),
            extras=dict(extras or {}),
            weights=weights,
            sequence_shares=tuple(sequence_shares),
            sequence_scale=None if sequence_scale is None else float(sequence_scale),
            token_scale=None if token_scale is None else float(token_scale),
            microbatch=microbatch,
            set_name=set_name,
            max_targets=max_targets,
            roles=None if roles is None else tuple(roles),
            **NOTHING_AROUND,
        )
        self._require_ids()

    def _require_ids(self) -> None:
        """Raise ValueError if the batch has not one of ``sequence_ids`` for each of its sequences."""
        if len(self.sequence_ids) != len(self.boundaries.sequence_lengths or ()):
            raise ValueError(
                f"{len(self.lengths)} lengths have {len(self.sequence_ids)} sequence_ids; want one each."
            )

    @classmethod
    def collate(
        cls,
        samples: Sequence[dict[str, Any]],
        *,
        align: Alignment | None = None,
        pad_to: int | None = None,
        sequence_ids: Sequence[int] | None = None,
        loss_scale: float | None = None,
        sequence_scale: float | None = None,
        token_scale: float | None = None,
        windows: Sequence[Window] = (),
        share_prefixes: bool = False,
        vision: Vision | None = None,
    ) -> THDBatch:
        """Lay samples end to end and shift the targets inside every sequence.

        Args:
            samples: dicts with ``input_ids`` (ints ``[n]``). Optional keys are ``labels`` (ints ``[n]``,
                unshifted, -100 where ignored), ``position_ids`` and ``next_label`` (int, the target of the
                last token of a piece of a sequence). ``weights`` is one number for the sequence, or one per
                token, aligned with labels. ``label`` is a number or list for the whole sequence. Token types
                are ints ``[n]``; other keys are tensors; both become ``extras``. No samples: one dummy slot.
                Dicts with the ids of a ``query``, its ``positive`` and any ``negative`` (one row of ids, or
                a list of rows) become several sequences, whose ``roles`` the batch holds.
            align: an ``alignment.Alignment`` that pads every sequence, and the pack by a trailing sequence.
            pad_to: slots of the batch; a trailing sequence of token 0, without targets, fills the rest.
            sequence_ids: dataset index of every sample; 0, 1, 2, ... by default.
            loss_scale: see the class; by default 1 / loss tokens of this batch, or their weight.
            sequence_scale: see the class; computed from this batch if ``loss_scale`` is not given.
            token_scale: see the class; computed from this batch if neither it nor ``loss_scale`` is given.
            windows: the attention windows of the model for which ``stats`` counts query-key pairs.
            share_prefixes: store and compute tokens of common prefixes only once. If samples have common
                prefixes, ``batch.prefixes`` maps them to their slots; loss and gradient are the same.
            vision: ``FlopsModel.vision`` of the model, with which ``stats`` counts the work on images.

        Returns:
            The batch on the CPU. Samples with the ids ``[5, 6]`` and ``[7]`` give ``input_ids``
            ``[5, 6, 7]``, ``targets`` ``[6, -100, -100]`` and ``cu_seqlens`` ``[0, 2, 3]``.
        """
        if share_prefixes is not False:
            flags(share_prefixes=share_prefixes)
        if sequence_ids is not None:
            sequence_ids = host_ints(sequence_ids, "sequence_ids").tolist()
        return collate_checked(
            check_samples(samples),
            share_prefixes=share_prefixes,
            align=align,
            pad_to=pad_to,
            sequence_ids=sequence_ids,
            loss_scale=loss_scale,
            sequence_scale=sequence_scale,
            token_scale=token_scale,
            windows=windows,
            vision=vision,
        )

    @classmethod
    def from_padded(cls, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> THDBatch:
        """Pack a padded batch by its mask, never by its pad id; this reads from the device once.

        Args:
            input_ids: ints ``[B, N]``: a tensor, list or array.
            attention_mask: ``[B, N]``, 1 where a token is real, else 0; left, right or ragged padding.
            labels: ints ``[B, N]``, unshifted, -100 where ignored; ``input_ids`` by default.

        Returns:
            The batch on the device of ``input_ids``. A row without a token becomes a sequence of length 0.
            ``ids [[0, 5, 6]]`` with mask ``[[0, 1, 1]]`` gives ``input_ids [5, 6]``, ``targets [6, -100]``.
        """
        batch = cls(**padded_fields(input_ids, attention_mask, labels))
        return batch.to(input_ids.device) if isinstance(input_ids, Tensor) else batch

    @property
    def targets(self) -> Tensor:
        """Return the next token of the same sequence for every slot, int64 ``[T]``, else -100."""
        if self._targets is None:
            self.boundaries.refuse_field("targets")
        return self._targets

    @property
    def cu_seqlens(self) -> Tensor:
        """Return the cumulative real lengths, int32 ``[S + 1]``."""
        return self.boundaries.cu_seqlens

    @property
    def cu_seqlens_padded(self) -> Tensor:
        """Return the offsets in memory, int32 ``[S + 1]``, last entry T."""
        return self.boundaries.cu_seqlens_padded

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the real length of every sequence, without a trailing pad."""
        lengths = self.boundaries.sequence_lengths
        assert lengths is not None
        return lengths

    @property
    def padded_lengths(self) -> tuple[int, ...]:
        """Return the slots of every sequence, and of a trailing pad."""
        return self.boundaries.padded_lengths

    @property
    def max_seqlen(self) -> int:
        """Return the slots of the longest sequence or of the trailing pad, at least 1."""
        self.boundaries.require_field("max_seqlen")
        return self.boundaries.max_seqlen

    @property
    def prefixes(self) -> Any:
        """Return the ``Prefixes`` that sequences share; None if they share none."""
        return prefixes_of(self.boundaries)

    @property
    def prediction_rows(self) -> PredictionRows:
        """Return the slots and targets of all predictions; ``predictions`` has their weights too."""
        return self.boundaries.prediction_rows(self._targets, self.max_targets)

    @property
    def token_targets(self) -> Tensor:
        """Return ``targets``; for a batch with shared prefixes, the target of each token of its sequences."""
        return self.boundaries.of_tokens(self.prediction_rows.targets, IGNORE_INDEX)

    @property
    def token_offsets(self) -> Tensor:
        """Return the offsets of the sequences among ``token_targets``, int32 ``[S + 1]``."""
        return self.boundaries.token_offsets

    @property
    def token_slots(self) -> int:
        """Return how many ``token_targets`` the batch has: its slots, or all tokens of shared prefixes."""
        return self.boundaries.token_slots

    def token_sequences(self) -> Tensor:
        """Return the sequence of each of ``token_targets``, int64; a trailing pad is one more."""
        return seq_idx_from_cu_seqlens(self.token_offsets, self.token_slots).flatten().long()

    @property
    def predictions(self) -> Predictions:
        """Return the rows of (slot, target, weight); losses of rows times weights add up to the batch's."""
        rows = self.prediction_rows
        slots = rows.slots
        if slots is None:
            slots = torch.arange(len(rows.targets), device=rows.targets.device)

        weights = self.weights
        if weights is None:
            weights = (self.token_targets != IGNORE_INDEX).float()
        return Predictions(slots, rows.targets, self.boundaries.of_rows(weights))

    def __getstate__(self) -> dict[str, Any]:
        names = THDBatch.__slots__
        return dict(zip(names, map(getattr, repeat(self), names), strict=True))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set(**state, **NOTHING_AROUND)

    def replace(self, **changes: Any) -> THDBatch:
        """Return a copy with some fields changed; fields that derive from them are not updated."""
        if "targets" in changes:
            changes["_targets"] = changes.pop("targets")
            changes.setdefault("max_targets", None)
        unknown = changes.keys() - set(THDBatch.__slots__)
        if unknown:
            raise TypeError(
                f"replace() got {sorted(unknown)}; wanted fields of a batch: {', '.join(_FIELDS)}."
            )

        copy = object.__new__(type(self))
        copy.__setstate__({**self.__getstate__(), **changes})
        copy._require_ids()
        copy._set(_step=self._step, watcher=self.watcher)
        return copy

    def to(self, device: torch.device | str, *, non_blocking: bool | None = None) -> THDBatch:
        """Move the tensors to a device; from CPU to CUDA, this is one copy that by default does not block."""
        if not isinstance(device, torch.device):
            device = checked_device(device)
        if self.boundaries.ranks > 1 and self.boundaries.stays(device):
            return self
        tensors = self._tensors()
        if device.type == "cpu" and all(x.is_cpu for x in tensors.values()):
            return self
        if self.input_ids.device.type == "meta" != device.type:
            raise ValueError(f"A batch on the meta device has no values to move to {device}. Collate again.")

        if non_blocking is None:  # the CPU would not wait for a copy; one to MPS would read freed memory
            non_blocking = device.type not in ("cpu", "mps")
        if device.type == "cuda" and self.input_ids.device.type == "cpu":
            pinned = self._pinned
            if pinned is None or not pinned.holds(tensors):
                pinned = self._pin()
            there, arrived = pinned.to(device, non_blocking=non_blocking)
            copy = self._with(there)
            copy._set(_arrived=arrived)
            return copy
        return self._with({name: x.to(device, non_blocking=non_blocking) for name, x in tensors.items()})

    def pin_memory(self) -> THDBatch:
        """Keep a copy of the tensors in one page-locked buffer, ready for upload, and return this batch."""
        self._set(_pinned=self._pin())
        return self

    def _pin(self) -> PinnedBatch:
        boundaries, filled = self.boundaries, None
        if boundaries.eager is None and boundaries.sequences is not None:
            filled = Filled.of(boundaries.filled_lengths, self.loss_scale)
        return PinnedBatch(self._tensors(), boundaries.counted_lengths, filled)

    def buffer(self) -> Tensor | None:
        """Return the int32 buffer in which this batch came to its GPU; None if none holds the batch."""
        return None if self._arrived is None else self._arrived.numbers()

    def _tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, those of ``boundaries`` and ``extras`` as ``extras.<key>``."""
        tensors = {"input_ids": self.input_ids, "position_ids": self.position_ids}
        if self._targets is not None:
            tensors["targets"] = self._targets
        if self.weights is not None:
            tensors["weights"] = self.weights
        tensors |= {f"boundaries.{name}": x for name, x in self.boundaries.tensors().items()}
        return tensors | {f"extras.{key}": value for key, value in self.extras.items()}

    def _with(self, tensors: dict[str, Tensor]) -> THDBatch:
        """Return a copy with other tensors, which have the names of ``_tensors``."""
        fields: dict[str, Any] = {name: tensors[name] for name in _TENSORS if name in tensors}
        if self._targets is not None:  # the number of targets is unknown if they were written in place
            fields["max_targets"] = None if version(self._targets) > 0 else self.max_targets
        moved = {name: tensors[f"boundaries.{name}"] for name in self.boundaries.tensors()}
        extras = {key: tensors[f"extras.{key}"] for key in self.extras}
        return self.replace(**fields, boundaries=self.boundaries.with_tensors(moved), extras=extras)

    def hf_kwargs(self) -> dict[str, Any]:
        """Return the arguments of a transformers model: the pack as a batch of one row.

        Returns:
            ``input_ids`` is ``[1, T]``, ``position_ids`` is ``[1, T]`` or ``[3, 1, T]``. ``boundaries`` says
            where every sequence begins. Beside it are transformers' own names for it, for kernels that read
            them: ``cu_seq_lens_q/k``, the offsets in memory, and ``max_length_q/k``, Python ints. If ranks
            share a pack, or sequences share prefixes, these would be wrong: only ``boundaries`` is passed,
            and models without "thd" are refused. Else ``attention_mask`` is None. ``use_cache`` is False,
            because the default True makes transformers ignore the boundaries. The extras follow, with
            ``labels``, one per sequence, if samples had a ``label``.
        """
        position_ids = self.position_ids
        is_mrope = position_ids.ndim > 1
        return {
            "input_ids": self.input_ids[None],
            "position_ids": position_ids[:, None] if is_mrope else position_ids[None],
            "attention_mask": None,
            "use_cache": False,
            **self.boundaries.hf_kwargs(),
            **self.extras,
        }

    def unpack(self, x: Tensor) -> list[Tensor]:
        """Split a per-token tensor into one tensor per sequence, without padding.

        ``x`` is ``[T, ...]``, or ``[1, T, ...]`` as a transformers model returns it. The tensors
        ``[length, ...]`` are in the order of ``sequence_ids``. If ranks share the pack, this gathers the
        slots of all ranks. If sequences share prefixes, ``x`` may also have one value per token of the
        sequences laid end to end, as ``causal_lm_logprobs`` returns them; if padding makes slots and tokens
        equally many, values of slots must be ``[1, T, ...]``.
        """
        rows = rows_of_slots(x, self.boundaries.slots)
        return self.boundaries.unpack(rows, single=rows is not x)

    def pool(self, x: Tensor, how: Literal["last", "mean", "first"] = "last") -> Tensor:
        """Reduce a per-token tensor to one row per sequence, without reading from the device.

        ``x`` is as for ``unpack``; ``how`` selects each sequence's last or first token, or the mean over its
        tokens, computed in fp32 or fp64. The rows ``[S, ...]`` have the dtype of ``x`` and the order of
        ``sequence_ids``. Lengths 2, 1 and values 1, 3, 7 of ``x`` give ``[3, 7]``, ``[1, 7]`` or ``[2, 7]``.
        """
        choice(how, "how", "last", "mean", "first")
        if 0 in self.lengths:
            empty = self.lengths.index(0)
            raise ValueError(f"Sequence {empty} of the batch has no tokens to pool. Remove empty rows.")

        if self.boundaries.own_slots:
            rows = rows_of_slots(x, self.boundaries.slots)
            self.boundaries.check_rows(rows)
            return self._pool_slots(rows, how)

        parts = self.unpack(x)
        if not parts:
            return rows_of_slots(x, self.boundaries.slots)[:0]
        if how == "mean":
            dtype = torch.promote_types(parts[0].dtype, torch.float32)
            return torch.stack([part.mean(0, dtype=dtype) for part in parts]).to(parts[0].dtype)
        place = -1 if how == "last" else 0
        return torch.stack([part[place] for part in parts])

    def _pool_slots(self, rows: Tensor, how: str) -> Tensor:
        """Pool rows of slots ``[T, ...]`` to ``[S, ...]`` by one gather or one sum, without a loop."""
        num_sequences = len(self.lengths)
        starts = self.cu_seqlens_padded[:num_sequences].to(rows.device).long()
        if how == "first":
            return rows.index_select(0, starts)
        lengths = self.cu_seqlens.diff()[:num_sequences].to(rows.device).long()
        if how == "last":
            return rows.index_select(0, starts + lengths - 1)

        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        column = (-1, *[1] * (rows.ndim - 1))  # the shape of one value per row, to broadcast over ``wide``
        sequence = self.token_sequences().to(rows.device)
        if self.padded_lengths != self.lengths:
            slot = torch.arange(len(rows), device=rows.device)
            stops = torch.cat([starts + lengths, starts.new_zeros(1)])  # 0 leaves out a trailing pad
            is_real = slot < stops.index_select(0, sequence.clamp(max=num_sequences))
            wide = torch.where(is_real.view(column), wide, 0.0)

        # One more row takes the slots of a trailing pad.
        sums = wide.new_zeros(num_sequences + 1, *rows.shape[1:]).index_add(0, sequence, wide)
        means = sums[:num_sequences] / lengths.view(column)
        return means.to(rows.dtype)

    @property
    def packs(self) -> tuple[THDBatch, ...]:
        """Return the batch itself, which is one pack."""
        return (self,)

    @property
    def agreed(self) -> tuple[float, ...]:
        """Return the number of packs, 1; packs that belong to no step may have different loss scales."""
        return (1,)

    def in_step(self) -> THDStep:
        """Return a step of this microbatch only."""
        return THDStep([self])

    def each(self, function: Callable[[THDBatch], THDBatch]) -> Self:
        """Return the result of a function of the batch."""
        return cast("Self", function(self))

    def note(self, name: str) -> None:
        """Note that a name was read; only a batch that notes its reads keeps it (see ``noted``)."""

    @property
    def step(self) -> tuple[THDStep, int] | None:
        """Return the ``THDStep`` that holds the batch, and the batch's place in it; None for a single batch.

        Copies of a microbatch (``to``, ``replace``) belong to the same step. RuntimeError if the step was
        deleted: keep it while you run its microbatches.
        """
        if self._step is None:
            return None
        reference, place = self._step
        step = reference()
        if step is None:
            raise RuntimeError(
                "The THDStep of this microbatch was deleted, and the loss needs all its microbatches. Keep "
                "the step in a variable: step = next(steps); for batch in step.microbatches: ..."
            )
        return step, place

    @property
    def loss_tokens(self) -> int:
        """Return the number of tokens with a target."""
        return self.stats.loss_tokens

    def __len__(self) -> int:
        return len(self.lengths)

    def keys(self) -> NoReturn:
        """Answer ``model(**batch)``, which asks a mapping for its keys first."""
        raise TypeError(f"A THDBatch is no dict, as in model(**batch). {TO_A_MODEL}")

    def __getitem__(self, key: object) -> NoReturn:
        name = key if isinstance(key, str) else "input_ids"
        instead = _INSTEAD.get(name) or f"Write batch.{name}"
        raise TypeError(
            f"A THDBatch is no dict, as in batch[{key!r}]. {instead}. batch.unpack(x) cuts x by sequence."
        )

    def __getattr__(self, name: str) -> NoReturn:  # only for names that a batch does not have
        instead = _INSTEAD.get(name)
        if instead is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise AttributeError(f"A THDBatch has no {name}. {instead}.")

    def __iter__(self) -> Iterator[Tensor]:
        # For self.log, Lightning takes the rows of the first tensor in a batch as the batch size.
        yield weighing_rows(epoch_weight(self))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self.lengths)} sequences, {self.stats.real_tokens} real tokens in "
            f"{self.input_ids.shape[-1]} slots, {self.loss_tokens} with a target, {self.input_ids.device})"
        )


def collate_checked(
    samples: Sequence[dict[str, Any]],
    *,
    set_name: str = "",
    microbatch: int = 0,
    share_prefixes: bool = False,
    **options: Any,
) -> THDBatch:
    """Collate samples that have already been checked; ``options`` are other arguments of ``collate``."""
    fields = lay_out_shared(samples, **options) if share_prefixes else lay_out(samples, **options)
    return THDBatch(**fields, set_name=set_name, microbatch=microbatch)


class THDStep(Packed):
    """All ``microbatches`` of one rank between two optimizer updates; all ranks have the same number."""

    __slots__ = ("__weakref__", "kept", "microbatches")

    microbatches: tuple[THDBatch, ...]
    kept: dict[type, Any]  # what a loss keeps for later microbatches of the step, by the class of it

    def __init__(self, microbatches: Sequence[THDBatch]) -> None:
        if not isinstance(microbatches, Sequence) or not all(isinstance(b, THDBatch) for b in microbatches):
            raise TypeError(f"A THDStep is made of {described(microbatches)}; wanted a list of THDBatch.")
        if not microbatches:
            raise ValueError("A THDStep needs at least one microbatch, got none.")
        self.__setstate__({"microbatches": tuple(microbatches)})

    def __getstate__(self) -> dict[str, Any]:
        return {"microbatches": self.microbatches}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "kept": {}})
        # The step holds its microbatches, so a reference back would keep both alive until a collection.
        for place, batch in enumerate(self.microbatches):
            batch._set(_step=(weakref.ref(self), place))

    @property
    def packs(self) -> tuple[THDBatch, ...]:
        """Return the microbatches, of which each is one pack."""
        return self.microbatches

    @property
    def agreed(self) -> tuple[float, ...]:
        """Return the number of microbatches and their loss scale."""
        return len(self.microbatches), self.microbatches[0].loss_scale

    def in_step(self) -> THDStep:
        """Return the step itself."""
        return self

    def each(self, function: Callable[[THDBatch], THDBatch]) -> Self:
        """Return a step of the results of a function of each microbatch; itself if none of them is new."""
        results = tuple(map(function, self.microbatches))
        if all(map(operator.is_, results, self.microbatches)):
            return self  # a batch knows one step, which a copy would take from it
        copy = object.__new__(type(self))
        copy.__setstate__({**self.__getstate__(), "microbatches": results})
        return copy

    def to(self, device: torch.device | str, *, non_blocking: bool | None = None) -> Self:
        """Move every microbatch; see ``THDBatch.to``."""
        return self.each(lambda batch: batch.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Keep copies of the microbatches in page-locked memory, and return this step."""
        return self.each(lambda batch: batch.pin_memory())

    @property
    def stats(self) -> SeqStats:
        """Return the ``SeqStats`` of all microbatches added up."""
        first, *rest = (batch.stats for batch in self.microbatches)
        return sum(rest, start=first)

    def __len__(self) -> int:
        return len(self.microbatches)

    def __iter__(self) -> Iterator[Tensor]:
        yield weighing_rows(sum(map(epoch_weight, self.microbatches)))


def check_batch(batch: object) -> None:
    """Raise TypeError if ``batch`` is not a ``THDBatch``, with advice for a ``THDStep``."""
    if isinstance(batch, THDStep):
        raise TypeError(
            f"batch is a THDStep of {len(batch)} microbatches; wanted one THDBatch. strategy='thd', "
            "'thd_ddp' and 'thd_model_parallel' pass them to training_step one at a time. In your own loop, "
            "run each of step.microbatches, and take the mean of their losses."
        )
    advice = "Give the Trainer a THDDataModule, or pass THDBatch.collate(samples)."
    instance(batch, "batch", THDBatch, advice=advice)
