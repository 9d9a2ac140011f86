"""The cut of a pack over context-parallel ranks -> index tensors, which attention finds by the offsets.

Attention gets ``cu_seqlens`` and nothing else that identifies a batch. So a shard's layout is looked up by
the shard's offsets. This works in any model, also if the backward pass recomputes a layer in another thread.
Legend: T slots in a pack, S sequences, N = T / cp slots of a shard.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_thd._checks import choice, whole_number
from lightning_thd.alignment import Layout
from lightning_thd.batch.upload import uploaded
from lightning_thd.parallel.context import partition

Communication = Literal["auto", "all_gather", "ulysses", "needed", "ring"]
_T = TypeVar("_T")


class KernelCall(NamedTuple):
    """The key rows, offsets and longest lengths of one kernel call on exchanged rows."""

    kv_index: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    max_seqlen_q: int
    max_seqlen_kv: int


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
    ) -> None:
        choice(communication, "communication", *get_args(Communication))
        whole_number(cp, "cp", least=1, advice="It is the number of context-parallel ranks.")
        whole_number(rank, "rank", most=cp - 1, advice=f"Ranks of cp={cp} count from 0.")
        self.padded_lengths = tuple(int(length) for length in padded_lengths)
        self.cp, self.rank, self.group = cp, rank, group
        self.layout: Layout = layout
        self.communication: Communication = communication
        self.device = torch.device(device)
        self.longest = max(self.padded_lengths, default=1)  # shard_batch() leaves the end's padding out
        self.sequences: int | None = None  # their number without the pad, if the caller knows it
        self.slots = sum(self.padded_lengths)
        self.local_slots = self.slots // cp
        own = partition.rank_indices(self.padded_lengths, cp=cp, rank=rank, layout=layout)
        self.held = partition.held_lengths(self.padded_lengths, cp=cp, rank=rank, layout=layout)
        self.own: Tensor  # int64 ``[N]``, the slots of the pack that this rank holds
        self.cu_seqlens: Tensor  # int32 ``[S + 1]``, the offsets of the sequences in the shard
        self.own, self.cu_seqlens = self.put((own, offsets_of(self.held)))
        self.used = False  # whether attention has looked this layout up
        self.job_ended = False  # whether ``end_job`` was called while this layout was alive
        self.cache: dict[Any, Any] = {}
        _remember(self)

    def offsets(self) -> Tensor:
        """Return the shard's offsets int32 ``[S + 1]``, by which ``layout_of`` finds this layout."""
        offsets = self.cu_seqlens.detach()
        offsets.__dict__["_thd_layout"] = self
        return offsets

    @property
    def restore(self) -> Tensor | None:
        """Return int64 ``[T]`` that puts the concatenated shards in pack order; None if they are in order."""
        if self.layout == "contiguous":
            return None
        lengths = self.padded_lengths
        found: Tensor = self.once("restore", lambda: self.put(partition.restore_indices(lengths, **self.cut)))
        return found

    @property
    def gathered(self) -> Tensor | None:
        """Return int64 ``[T]`` that puts a pack in the order of all shards; None if that is pack order."""
        if self.layout == "contiguous":
            return None
        ranks, lengths = range(self.cp), self.padded_lengths
        shards = (partition.rank_indices(lengths, rank=rank, **self.cut) for rank in ranks)
        found: Tensor = self.once("gathered", lambda: self.put(np.concatenate(list(shards))))
        return found

    @property
    def pack_offsets(self) -> Tensor:
        """Return int32 ``[S + 1]``, the offsets of the sequences in the whole pack."""
        found: Tensor = self.once("offsets", lambda: self.put(offsets_of(np.asarray(self.padded_lengths))))
        return found

    def call(self, *, causal: bool, left: int) -> KernelCall:
        """Return this rank's kernel call on gathered keys, computed once per batch and kind of layer."""

        def make() -> KernelCall:
            where = partition.restore_indices(self.padded_lengths, **self.cut)
            return self.make_call(where, causal=causal, left=left)

        return self.once(("call", causal, left), make)

    def make_call(self, where: partition.Ints, *, causal: bool, left: int) -> KernelCall:
        """Build the kernel call; ``where`` has the row of every slot of the pack among the exchanged keys."""
        plan = partition.plan_keys(self.padded_lengths, **self.cut, rank=self.rank, causal=causal, left=left)
        on_host = where[plan.kv_slots], offsets_of(plan.q_lengths), offsets_of(plan.kv_lengths)
        rows, cu_seqlens_q, cu_seqlens_kv = self.put(on_host)
        return KernelCall(
            kv_index=rows,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            max_seqlen_q=int(plan.q_lengths.max(initial=1)),
            max_seqlen_kv=int(plan.kv_lengths.max(initial=1)),
        )

    def once(self, key: Any, make: Callable[[], _T]) -> _T:
        """Return the result of ``make``, which is called once per batch and key; layers share the result."""
        if key not in self.cache:
            self.cache[key] = make()
        found: _T = self.cache[key]
        return found

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


# Layouts by the memory address of their offsets. A layout keeps this memory alive, so any other tensor at the
# address is a view of the offsets.
_BY_OFFSETS: weakref.WeakValueDictionary[int, ShardLayout] = weakref.WeakValueDictionary()

# True while a layout is alive. Attention without context parallelism reads only this flag. torch.compile
# guards on it, and traces attention again when it changes.
in_use = False


def _remember(layout: ShardLayout) -> None:
    global in_use
    in_use = True
    _BY_OFFSETS[layout.cu_seqlens.data_ptr()] = layout
    weakref.finalize(layout, _forget).atexit = False


def _forget() -> None:
    global in_use
    in_use = any(True for _ in _BY_OFFSETS.values())  # values() skips layouts that were freed


def layout_of(cu_seqlens: Tensor) -> ShardLayout | None:
    """Return the layout whose shard has these offsets, or None for any other offsets."""
    if not _BY_OFFSETS or cu_seqlens.is_meta:
        return None
    layout = _BY_OFFSETS.get(cu_seqlens.data_ptr())
    if layout is not None:
        layout.used = True
    return layout


def end_job() -> None:
    """Mark all layouts as those of an ended job, so that live shards do not make other attention fail."""
    for layout in list(_BY_OFFSETS.values()):
        layout.job_ended = True


# Offsets of whole packs that run beside shards, by memory address. Only offsets that are alive are listed.
_WHOLE: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


def know_whole_pack(cu_seqlens: Tensor) -> None:
    """Register offsets as those of a whole pack, even while shards of other packs are in use."""
    _WHOLE[cu_seqlens.data_ptr()] = cu_seqlens


def refuse_unknown_offsets(cu_seqlens: Tensor, slots: int) -> None:
    """Refuse unknown offsets of as many slots as a live shard has: attention would be wrong silently."""
    if cu_seqlens.data_ptr() in _WHOLE:
        return
    if _in_use_over(slots, cu_seqlens.device) is None:
        return
    gc.collect()  # frees shards that only a reference cycle keeps alive, such as a traceback
    layout = _in_use_over(slots, cu_seqlens.device)
    if layout is not None:
        raise ValueError(
            f"Attention over {slots} slots got cu_seqlens that are not those of the batch, which is cut over "
            f"{layout.cp} context-parallel ranks. Pass batch.cu_seqlens_padded itself, or batch.hf_kwargs()."
        )


def _in_use_over(slots: int, device: torch.device) -> ShardLayout | None:
    for layout in list(_BY_OFFSETS.values()):
        if layout.local_slots == slots and layout.device == device and not layout.job_ended:
            return layout
    return None
