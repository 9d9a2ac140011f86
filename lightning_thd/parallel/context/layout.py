"""The cut of a pack over context-parallel ranks -> index tensors, and the boundaries of one rank's shard.

Legend: T slots in a pack, S sequences, N = T / cp slots of a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_thd._checks import choice, whole_number
from lightning_thd.alignment import Layout
from lightning_thd.batch.upload import uploaded
from lightning_thd.boundaries import Boundaries, KernelCall
from lightning_thd.boundaries.core import ForThdOnly, Need, Unfolded
from lightning_thd.parallel.context import partition
from lightning_thd.parallel.context.traffic import Traffic
from lightning_thd.parallel.exchange import all_gather_rows, mapped, reduced

Communication = Literal["auto", "all_gather", "ulysses", "needed", "ring"]
_T = TypeVar("_T")


class ShardLayout:
    """Which slots of one pack each context-parallel rank holds."""

    def __init__(
        self,
        padded_lengths: Sequence[int],  # the padding at the end of the pack included
        *,
        cp: int,
        rank: int,
        group: dist.ProcessGroup | None = None,  # None only if nothing is communicated
        layout: Layout = "dual_chunk",
        communication: Communication = "auto",
        device: torch.device | str = "cpu",
        traffic: Traffic | None = None,  # counts what layers receive; None counts those of this pack
    ) -> None:
        choice(communication, "communication", *get_args(Communication))
        whole_number(cp, "cp", least=1, advice="It is the number of context-parallel ranks.")
        whole_number(rank, "rank", most=cp - 1, advice=f"Ranks of cp={cp} count from 0.")

        self.padded_lengths = tuple(int(length) for length in padded_lengths)
        self.cp = cp
        self.rank = rank
        self.group = group
        self.layout: Layout = layout
        self.communication: Communication = communication
        self.device = torch.device(device)
        self.traffic = Traffic() if traffic is None else traffic
        self.longest = max(self.padded_lengths, default=1)  # shard_batch() leaves the end's padding out
        self.sequences: int | None = None  # their number without the pad, if the caller knows it

        self.slots = sum(self.padded_lengths)
        self.local_slots = self.slots // cp
        slots_of_rank = partition.rank_indices(self.padded_lengths, cp=cp, rank=rank, layout=layout)
        self.held = partition.held_lengths(self.padded_lengths, cp=cp, rank=rank, layout=layout)
        self.own: Tensor  # int64 ``[N]``, the slots of the pack that this rank holds
        self.cu_seqlens: Tensor  # int32 ``[S + 1]``, the offsets of the sequences in the shard
        self.own, self.cu_seqlens = self.put((slots_of_rank, offsets_of(self.held)))

        self.used = False  # whether a layer has asked for this layout
        self.cache: dict[Any, Any] = {}

    @property
    def restore(self) -> Tensor | None:
        """Return int64 ``[T]`` that puts the concatenated shards in pack order; None if they are in order."""
        if self.layout == "contiguous":
            return None

        def make() -> Tensor:
            restore: Tensor = self.put(partition.restore_indices(self.padded_lengths, **self.cut))
            return restore

        return self.once("restore", make)

    @property
    def gathered(self) -> Tensor | None:
        """Return int64 ``[T]`` that puts a pack in the order of all shards; None if that is pack order."""
        if self.layout == "contiguous":
            return None

        def make() -> Tensor:
            lengths = self.padded_lengths
            shards = [partition.rank_indices(lengths, rank=rank, **self.cut) for rank in range(self.cp)]
            order: Tensor = self.put(np.concatenate(shards))
            return order

        return self.once("gathered", make)

    @property
    def pack_offsets(self) -> Tensor:
        """Return int32 ``[S + 1]``, the offsets of the sequences in the whole pack."""

        def make() -> Tensor:
            offsets: Tensor = self.put(offsets_of(np.asarray(self.padded_lengths)))
            return offsets

        return self.once("offsets", make)

    def pack_boundaries(self) -> Boundaries:
        """Return the boundaries of the whole pack, whose entries are the sequences with their padding."""

        def make() -> Boundaries:
            longest = max(1, *self.padded_lengths)
            return Boundaries(
                offsets=self.pack_offsets, max_seqlen=longest, slots=self.slots, lengths=self.padded_lengths
            )

        return self.once("pack", make)

    @property
    def carries(self) -> bool:
        """Return whether the state of a recurrent layer can go from rank to rank."""
        return self.layout != "striped"

    def call(self, *, causal: bool, left: int) -> KernelCall:
        """Return this rank's kernel call on gathered keys, computed once per batch and kind of layer."""

        def make() -> KernelCall:
            row_of_slot = partition.restore_indices(self.padded_lengths, **self.cut)
            return self.make_call(row_of_slot, causal=causal, left=left)

        return self.once(("call", causal, left), make)

    def make_call(self, row_of_slot: partition.Ints, *, causal: bool, left: int) -> KernelCall:
        """Build the kernel call; ``row_of_slot`` is each slot's row among the exchanged keys."""
        plan = partition.plan_keys(self.padded_lengths, **self.cut, rank=self.rank, causal=causal, left=left)
        rows, cu_seqlens_q, cu_seqlens_kv = self.put(
            (row_of_slot[plan.kv_slots], offsets_of(plan.q_lengths), offsets_of(plan.kv_lengths))
        )
        return KernelCall(
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            max_seqlen_q=int(plan.q_lengths.max(initial=1)),
            max_seqlen_kv=int(plan.kv_lengths.max(initial=1)),
            keys=rows,
            q_lengths=tuple(plan.q_lengths.tolist()),
            kv_lengths=tuple(plan.kv_lengths.tolist()),
        )

    def once(self, key: Any, make: Callable[[], _T]) -> _T:
        """Return the result of ``make``, which is called once per batch and key; layers share the result."""
        if key not in self.cache:
            self.cache[key] = make()
        result: _T = self.cache[key]
        return result

    @property
    def cut(self) -> dict[str, Any]:
        """Return the number of ranks and the layout as keywords for ``partition`` and ``needs``."""
        return {"cp": self.cp, "layout": self.layout}

    def put(self, indices: Any) -> Any:
        """Copy host arrays, in tuples or lists of any depth, to the device at once, without waiting."""
        return uploaded(indices, self.device)


def offsets_of(lengths: partition.Ints) -> npt.NDArray[np.int32]:
    """Return int32 offsets ``[n + 1]`` on the host: the lengths summed up from 0."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


class ShardBoundaries(Boundaries):
    """The boundaries of the slots of a pack that one context-parallel rank holds.

    An entry is this rank's part of a sequence, or of the pad at the end; it is empty if only other ranks hold
    the sequence. ``sequence_lengths`` and ``padded_lengths`` are the whole pack's.
    """

    __slots__ = ("layout",)

    layout: ShardLayout
    row = "shard"
    own_slots = False
    eager = "context_parallel"  # the sizes of exchanges between ranks differ between batches

    @classmethod
    def of(cls, whole: Boundaries, shard: ShardLayout) -> ShardBoundaries:
        """Make the boundaries of this rank's shard from those of the whole pack."""
        assert whole.sequence_lengths is not None
        real_offsets = None
        if whole.real_offsets is not None:
            real = partition.held_real_lengths(
                whole.sequence_lengths, shard.padded_lengths, rank=shard.rank, **shard.cut
            )
            real_offsets = shard.put(offsets_of(real))

        boundaries = cls(
            offsets=shard.cu_seqlens,
            slots=shard.local_slots,
            max_seqlen=max(1, int(shard.held.max(initial=1))),
            lengths=shard.held.tolist(),
            sequence_lengths=whole.sequence_lengths,
            real_offsets=real_offsets,
            longest=whole.longest,
        )
        boundaries._set(layout=shard)
        return boundaries

    @property
    def ranks(self) -> int:  # type: ignore[override]
        """Return the number of ranks that share the pack."""
        return self.layout.cp

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Return the process group of these ranks; None if nothing is communicated."""
        return self.layout.group

    @property
    def used(self) -> bool:  # type: ignore[override]
        """Return whether a layer has asked how rows come from other ranks."""
        return self.layout.used

    def call(self, layer: object = None, *, causal: bool = True, chunk: int | None = None) -> KernelCall:
        """Return the offsets of the shard, and the layout by which attention exchanges keys."""
        if chunk is not None:
            raise ValueError(
                f"{type(layer).__name__} attends in chunks of {chunk}: use sequences of at most {chunk}, or "
                "train this model without context parallelism."
            )
        if not causal:
            self.require("both_ways", layer)
        self.layout.used = True
        longest = self.max_seqlen
        return KernelCall(self.offsets, self.offsets, longest, longest, exchange=self.layout)

    def require(self, need: Need, layer: object) -> None:
        """Raise ValueError if what needs something does not run on a shard."""
        if need == "both_ways" and self.real_offsets is not None:
            why = "lets tokens see later tokens, and context parallelism pads sequences"
            self.require_own_slots(layer, why)
        if need == "next_label":
            raise ValueError(
                f"{type(layer).__name__} got labels and one rank's shard of a pack, whose last target is on "
                "another rank. Leave labels out and use lightning_thd.causal_lm_loss(model, batch)."
            )

    def unfolded(self) -> Unfolded:
        """Return the whole pack; the way there is a collective."""
        self.layout.used = True
        return Unfolded(self.layout.pack_boundaries(), gather=self._gathered, keep=self.part)

    def _gathered(self, rows: Tensor) -> Tensor:
        """Gather a layer's rows of all ranks, of any dtype; a collective."""
        self.layout.traffic.count("gathered")
        if rows.is_floating_point():
            return self.whole(rows)
        return self.whole(rows.to(torch.int64)).to(rows.dtype)

    def require_own_slots(self, layer: object, why: str) -> None:
        """Raise ValueError, because a layer cannot run on one rank's shard of a pack."""
        raise ValueError(
            f"{type(layer).__name__} got one rank's shard of a pack, and {why}. Train this model without "
            "context parallelism."
        )

    def refuse_field(self, name: str) -> NoReturn:
        """Raise ValueError, because offsets of a shard say nothing about the keys on other ranks."""
        raise ValueError(
            f"batch.{name} was read, but {self.layout.cp} context-parallel ranks share this pack, so "
            "attention over this rank's slots alone would be wrong. Pass batch.boundaries: "
            "varlen_attention(q, k, v, batch.boundaries)."
        )

    @property
    def cu_seqlens(self) -> Tensor:
        """Refuse: the offsets of a shard say nothing about the keys on other ranks."""
        self.refuse_field("cu_seqlens")

    @property
    def cu_seqlens_padded(self) -> Tensor:
        """Refuse: the offsets of a shard say nothing about the keys on other ranks."""
        self.refuse_field("cu_seqlens_padded")

    @property
    def padded_lengths(self) -> tuple[int, ...]:
        """Return the slots of every entry of the whole pack."""
        return self.layout.padded_lengths

    @property
    def real_lengths(self) -> tuple[int, ...]:
        """Return the real tokens of every entry on this rank."""
        return self.lengths if self.real_offsets is None else self.once(_held_tokens)

    @property
    def positions(self) -> Tensor:
        """Return int64 ``[N]``, the place of every slot in its sequence."""
        positions: Tensor = _positions(self)
        return positions

    @property
    def longest_entry(self) -> int:
        """Return the slots of the longest entry of the whole pack, a pad at the end included."""
        return max(self.layout.padded_lengths)

    @property
    def counted_lengths(self) -> tuple[int, ...]:
        """Return no lengths, because the positions of a shard do not count from 0."""
        return ()

    def stays(self, device: torch.device) -> bool:
        """Return True on the device of the shard, else raise: batches are moved before they are cut."""
        here = self.layout.device  # without an index: the current device
        if device.type == here.type and (device.index == here.index or None in (device.index, here.index)):
            return True
        raise ValueError(f"A shard on {here} cannot move to {device}. Move the THDBatch before it is cut.")

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> ShardBoundaries:
        """Return the boundaries themselves; refuse another device."""
        self.stays(torch.device(device))
        return self

    def hf_kwargs(self) -> dict[str, Any]:
        """Return the boundaries only: offsets under transformers' names would hide keys of other ranks."""
        only = ForThdOnly("slots that context-parallel ranks share")
        return {"boundaries": self, "attention_mask": only}

    def unpack(self, rows: Tensor, *, single: bool) -> list[Tensor]:
        """Gather rows of slots of all ranks and split them into sequences; a collective."""
        self.check_rows(rows)
        assert self.sequence_lengths is not None
        parts = torch.split(self.whole(rows), list(self.padded_lengths))
        return [part[:length] for part, length in zip(parts, self.sequence_lengths, strict=False)]

    def whole(self, rows: Tensor) -> Tensor:
        """Gather the rows ``[N, ...]`` of all ranks to ``[T, ...]`` in the pack's order; a collective."""
        return gather_pack(rows, self.layout)

    def part(self, rows: Tensor) -> Tensor:
        """Return this rank's rows of rows ``[T, ...]`` of the pack."""
        return rows.index_select(0, self.layout.own)

    @property
    def whole_offsets(self) -> Tensor:
        """Return the offsets of the whole pack, int32 ``[S + 1]``."""
        return self.layout.pack_offsets

    def pack_value(self, loss: Tensor) -> Tensor:
        """Return a loss with the value of the whole pack, for logs, and the gradient of this rank's shard."""
        group = self.layout.group
        if group is None:
            return loss

        def mean_over_ranks(share: Tensor) -> Tensor:
            mean: Tensor = reduced(share, group) / group.size()
            return mean

        return mapped(loss, mean_over_ranks, lambda gradient: gradient)

    def __reduce__(self) -> Any:
        raise TypeError(
            "A shard belongs to a process group and cannot be pickled. Send the THDBatch and cut it there."
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the pack's offsets may have to be uploaded
def _positions(boundaries: ShardBoundaries) -> Tensor:
    return boundaries.once(_places)


def _places(boundaries: ShardBoundaries) -> Tensor:
    """Return ``ShardBoundaries.positions``, from those of the whole pack."""
    return boundaries.part(boundaries.layout.pack_boundaries().positions)


def _held_tokens(boundaries: ShardBoundaries) -> tuple[int, ...]:
    """Return ``ShardBoundaries.real_lengths`` of padded sequences; this reads the device once."""
    assert boundaries.real_offsets is not None
    return tuple(boundaries.real_offsets.diff().tolist())


def gather_pack(x: Tensor, shard: ShardLayout) -> Tensor:
    """Gather the shards ``[N, ...]`` of all ranks to ``[T, ...]`` in the pack's order; a collective."""
    assert shard.group is not None
    gathered = all_gather_rows(x, shard.group, shard.traffic)
    return gathered if shard.restore is None else gathered.index_select(0, shard.restore)
