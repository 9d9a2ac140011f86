"""A bucket cut for context parallelism -> index buffers that hold the partition of any pack that fits it.

What context-parallel attention and state-space layers ask of a layout has the same size for every pack of a
bucket when sequences are cut into two chunks a rank: a rank holds T / cp slots, and its queries see
``(2 cp + 1) T / (2 cp)`` keys, whatever the lengths.

Legend: T slots and S sequences of the bucket, N = T / cp slots of a shard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_thd.batch import THDBatch
from lightning_thd.cuda_graph.buckets import Bucket, Ints, Layout, dummy_batch, offsets_of
from lightning_thd.cuda_graph.errors import CaptureError
from lightning_thd.parallel.context import partition
from lightning_thd.parallel.context.layout import _BY_OFFSETS as known_layouts
from lightning_thd.parallel.context.layout import Call, Communication, ShardLayout
from lightning_thd.parallel.shard import THDShard, shard_batch

_CALL = "static call"


class Cut(NamedTuple):
    """How context parallelism cuts packs, the same for every batch of a job."""

    cp: int
    rank: int
    group: dist.ProcessGroup | None
    communication: Communication

    @classmethod
    def of(cls, batch: THDBatch) -> Cut | None:
        """Return how a shard was cut; None for a whole pack."""
        if not isinstance(batch, THDShard):
            return None
        layout = batch.layout
        return cls(layout.cp, layout.rank, layout.group, layout.communication)

    @property
    def multiple(self) -> int:
        """Return the number of slots that every padded length is a multiple of."""
        return 2 * self.cp

    def dummy(self, layout: Layout, device: torch.device, *, axes: int | None) -> THDShard:
        """Make a rank's shard of a dummy pack; see ``dummy_batch``."""
        batch = dummy_batch(layout, device, axes=axes, multiple=self.multiple)
        return shard_batch(
            batch, group=self.group, cp=self.cp, rank=self.rank, communication=self.communication
        )


def refuse_cut(batch: THDBatch, bucket: Bucket) -> None:
    """Refuse shards whose layout no graph can replay, and buckets that do not divide over the ranks."""
    cut = Cut.of(batch)
    if cut is None:
        return
    assert isinstance(batch, THDShard)
    if batch.layout.layout != "dual_chunk":
        raise CaptureError(
            f"context_parallel_layout={batch.layout.layout!r} cuts the row of a pack, so that ranks hold "
            "other slots once it is padded to a bucket. Use context_parallel_layout='dual_chunk'."
        )
    if bucket.slots % cut.multiple or bucket.max_seqlen % cut.multiple:
        raise CaptureError(
            f"{bucket} over {cut.cp} context-parallel ranks: slots and max_seqlen have to be multiples of "
            f"{cut.multiple}, as the lengths of sequences are."
        )


class StaticShardLayout(ShardLayout):
    """The layout of a shard in a graph: its index tensors are buffers of fixed address.

    ``asked`` holds what attention has asked for so far. It is shared with the layouts that warm-ups run on,
    as nothing new can be made during a capture.
    """

    def __init__(self, bucket: Bucket, cut: Cut, device: torch.device, asked: dict[Any, Any]) -> None:
        # Filled with its longest sequences, for limits that kernels are built for.
        whole, rest = divmod(bucket.slots, bucket.max_seqlen)
        lengths = [bucket.max_seqlen] * whole + [rest] * bool(rest)
        super().__init__(
            lengths + [0] * (bucket.sequences - len(lengths)),
            cp=cut.cp,
            rank=cut.rank,
            group=cut.group,
            communication=cut.communication,
            device=device,
        )
        self._bucket, self._asked = bucket, asked
        known_layouts.pop(self.cu_seqlens.data_ptr())  # until ``known``
        # Made now, for all that a layout makes when it is asked is of the dummy it was built from.
        made = (self.restore, self.gathered, self.pack_offsets)
        assert all(x is not None for x in made)
        self.prepare()

    @contextlib.contextmanager
    def known(self) -> Iterator[None]:
        """Register this layout by its offsets, so that attention finds it inside this context."""
        known_layouts[self.cu_seqlens.data_ptr()] = self
        try:
            yield
            # These do not depend on lengths, so that other layouts of this bucket share them.
            self._asked.update({key: x for key, x in self.cache.items() if key[0] == "kv_heads"})
        finally:
            known_layouts.pop(self.cu_seqlens.data_ptr(), None)

    def prepare(self) -> None:
        """Build the tensors that attention has asked other layouts of this bucket for."""
        self.cache.update(self._asked)
        if _CALL in self._asked:
            restore = partition.restore_indices(self.padded_lengths, cp=self.cp, layout=self.layout)
            tensors = self._call_of(np.asarray(self.padded_lengths, dtype=np.int64), restore)
            index, cu_q, cu_kv = (x.to(self.device, non_blocking=True) for x in tensors)
            longest = self._bucket.max_seqlen
            self.cache[_CALL] = Call(index, cu_q, cu_kv, max(1, longest // (2 * self.cp)), longest)

    @property
    def fixed(self) -> bool:
        """Return True: a graph replays the sizes it was recorded with."""
        return True

    def check_varying(self, communication: str) -> None:
        """Refuse ways of communicating whose message sizes depend on lengths."""
        raise CaptureError(
            f"context_parallel_communication={communication!r} exchanges as many keys as the lengths of the "
            "sequences ask for, and a graph replays one size. Use 'ulysses', 'all_gather', or 'auto', which "
            "takes one of the two in graphs."
        )

    def call(self, *, causal: bool, left: int) -> Call:
        """Return the index buffers of a kernel call on gathered keys; refuse windows."""
        if not causal or left >= 0:
            raise CaptureError(
                "attention gathers the keys of a window (context_parallel_communication='all_gather'), and "
                "their number depends on the lengths of the sequences. Use 'ulysses', which 'auto' takes "
                "where the ranks divide the query heads."
            )
        if _CALL not in self.cache:
            self._asked[_CALL] = None
            self.prepare()
        call: Call = self.cache[_CALL]
        return call

    def refill(self, padded_lengths: Ints) -> list[tuple[Tensor, Tensor]]:
        """Pair every buffer with its new content, for padded lengths int64 ``[S]`` that sum to T."""
        of = {"cp": self.cp, "layout": self.layout}
        held = [partition.rank_indices(padded_lengths, rank=r, **of) for r in range(self.cp)]  # type: ignore[arg-type]
        gathered = np.concatenate(held)
        restore = np.empty_like(gathered)
        restore[gathered] = np.arange(len(gathered))
        assert self.restore is not None
        assert self.gathered is not None
        pairs = [
            (self.own, torch.from_numpy(held[self.rank])),
            (self.cu_seqlens, offsets_of(padded_lengths // self.cp)),
            (self.restore, torch.from_numpy(restore)),
            (self.gathered, torch.from_numpy(gathered)),
            (self.pack_offsets, offsets_of(padded_lengths)),
        ]
        if _CALL in self.cache:
            new, call = self._call_of(padded_lengths, restore), self.cache[_CALL]
            pairs += list(zip(call[:3], new, strict=True))
        return pairs

    def _call_of(self, padded_lengths: Ints, restore: Ints) -> tuple[Tensor, Tensor, Tensor]:
        plan = partition.plan_keys(padded_lengths.tolist(), cp=self.cp, rank=self.rank, layout=self.layout)
        spare = 2 * self._bucket.sequences - len(plan.q_lengths)  # two calls a sequence, none for empty ones
        q, kv = (np.pad(x, (0, spare)) for x in (plan.q_lengths, plan.kv_lengths))
        return torch.from_numpy(restore[plan.kv_slots]), offsets_of(q), offsets_of(kv)
