"""A pack whose sequences share prefixes, number of ranks -> the slots, keys and predictions of one rank.

Ranks share the row of slots, not every sequence: ``contiguous`` gives each rank one stretch of it, all other
layouts two chunks, one from each half. A fragment is the part of a leaf in such a stretch. Its queries see
the path from the root to the fragment's end. So every rank gathers the keys of all slots, and an index
selects those of its fragments' paths. Legend: T slots, N = T / cp slots of a shard, F fragments, R
predictions, M tokens of all sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_thd.alignment import Layout
from lightning_thd.batch.keys import IGNORE_INDEX
from lightning_thd.batch.prefixes import PrefixBoundaries, Prefixes, SharedBoundaries
from lightning_thd.boundaries import Boundaries, KernelCall
from lightning_thd.boundaries.core import Need
from lightning_thd.parallel.context import partition
from lightning_thd.parallel.context.layout import Communication, ShardBoundaries, ShardLayout, offsets_of
from lightning_thd.parallel.context.partition import Ints, ranges
from lightning_thd.parallel.context.traffic import Traffic


class Fragments(NamedTuple):
    """The parts of leaves that one rank holds, in the order of its slots; int64 ``[F]`` each."""

    leaf: Ints  # the index of each fragment's leaf
    start: Ints  # the fragment's first slot, counted inside the leaf
    stop: Ints  # the slot after the fragment's last slot


def cut_leaves(query_lengths: tuple[int, ...], *, cp: int, rank: int, layout: Layout) -> Fragments:
    """Cut leaves, laid end to end, by the stretches of the row that a rank holds.

    Two ranks cut leaves of 3 and 5 slots contiguously: rank 0 holds slots 0 to 3 of leaf 0 and 0 to 1 of
    leaf 1, rank 1 holds slots 1 to 5 of leaf 1.
    """
    lengths = np.asarray(query_lengths, dtype=np.int64)
    leaf_ends = np.cumsum(lengths)
    leaf_starts = leaf_ends - lengths
    stretches = partition.pieces_of_rank([int(leaf_ends[-1])], cp=cp, rank=rank, layout=layout)
    fragments = []

    for start, stop in zip(stretches.start.tolist(), stretches.stop.tolist(), strict=True):
        first = np.clip(start - leaf_starts, 0, lengths)
        last = np.clip(stop - leaf_starts, 0, lengths)
        leaves = np.flatnonzero(last > first)  # those that reach into the stretch
        fragments.append((leaves, first[leaves], last[leaves]))

    return Fragments(*map(np.concatenate, zip(*fragments, strict=True)))


class SharedLayout(ShardLayout):
    """Which slots of a pack with shared prefixes each context-parallel rank holds."""

    def __init__(
        self,
        whole: SharedBoundaries,
        *,
        cp: int,
        rank: int,
        group: dist.ProcessGroup | None,
        layout: Layout,
        communication: Communication,
        device: torch.device,
        traffic: Traffic,
    ) -> None:
        if communication not in ("auto", "all_gather"):
            raise ValueError(
                f"context_parallel_communication={communication!r} with sequences that share prefixes, "
                "whose keys every rank gathers. Use 'auto' or 'all_gather', or share_prefixes=False."
            )

        if layout == "striped":
            raise ValueError(
                "context_parallel_layout='striped' with sequences that share prefixes, which are cut into "
                "stretches of slots. Use 'dual_chunk', 'mixed' or 'contiguous', or share_prefixes=False."
            )

        super().__init__(
            (whole.slots,),
            cp=cp,
            rank=rank,
            group=group,
            layout="contiguous" if layout == "contiguous" else "dual_chunk",
            communication="all_gather",
            device=device,
            traffic=traffic,
        )
        self.whole = whole
        self.fragments = cut_leaves(whole.prefixes.query_lengths, rank=rank, **self.cut)

    @property
    def carries(self) -> bool:
        """Return False: the states of branches go to any rank."""
        return False

    def pack_boundaries(self) -> Boundaries:
        """Return the boundaries of the whole pack."""
        return self.whole

    def call(self, *, causal: bool, left: int) -> KernelCall:
        """Return this rank's kernel call on gathered keys, computed once per batch and kind of layer."""
        assert causal, "layers that see later tokens are refused"
        return self.once(("call", left), lambda: self._call(left))

    def _call(self, left: int) -> KernelCall:
        """Compute the kernel call of layers that see ``left`` earlier tokens, or all if that is negative."""
        prefixes = self.whole.prefixes
        leaf, start, stop = self.fragments
        queries = np.asarray(prefixes.query_lengths, dtype=np.int64)[leaf]
        keys = np.asarray(prefixes.key_lengths, dtype=np.int64)

        # A fragment sees a part of its leaf's path: up to its own end, from the first key of its window.
        before_leaf = keys[leaf] - queries
        first_key = np.zeros_like(before_leaf)
        if left >= 0:
            first_key = np.maximum(before_leaf + start - left, 0)
        end_key = before_leaf + stop
        q_lengths = stop - start
        kv_lengths = end_key - first_key

        # The keys of all paths lie end to end; each has the slot that holds it, and slots are gathered rows.
        path_start = (np.cumsum(keys) - keys)[leaf]
        places = ranges(path_start + first_key, path_start + end_key)
        row_of_slot = partition.restore_indices(self.padded_lengths, **self.cut)
        on_host = places, row_of_slot, offsets_of(q_lengths), offsets_of(kv_lengths)
        key_places, key_rows, cu_seqlens_q, cu_seqlens_kv = self.put(on_host)
        key_slots = prefixes.keys.index_select(0, key_places)

        return KernelCall(
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            max_seqlen_q=int(q_lengths.max()),
            max_seqlen_kv=int(kv_lengths.max()),
            keys=key_rows.index_select(0, key_slots),
            q_lengths=tuple(q_lengths.tolist()),
            kv_lengths=tuple(kv_lengths.tolist()),
        )


class ShardPrefixes(Prefixes):
    """The mapping from sequences to the slots of one rank.

    ``slots`` and ``targets`` are the rank's predictions; ``token_rows`` is R for the tokens that other ranks
    predict. ``token_slots`` is 0 for the tokens of other ranks; ``here`` says which tokens are on this one.
    All else is the whole pack's.
    """

    __slots__ = ("here",)

    here: Tensor  # bool ``[M]``


def prefixes_of_rank(shard: SharedLayout) -> ShardPrefixes:
    """Return the predictions whose slots a rank holds, and the places of tokens in its shard."""
    whole = shard.whole.prefixes
    in_shard = partition.rank_indices(shard.padded_lengths, rank=shard.rank, **shard.cut)
    place_of_slot = np.full(shard.slots, -1)  # in this shard; -1 for slots of other ranks
    place_of_slot[in_shard] = np.arange(len(in_shard))

    # The predictions of this rank, and the number of each among them; the others get the number after all.
    place_of_row = place_of_slot[whole.prediction_slots]
    kept_rows = np.flatnonzero(place_of_row >= 0)
    number_of_row = np.full(len(place_of_row) + 1, max(1, len(kept_rows)))
    number_of_row[kept_rows] = np.arange(len(kept_rows))

    on_host = kept_rows, place_of_row[kept_rows], number_of_row, place_of_slot
    rows, slots, numbers, places = shard.put(on_host)
    targets = whole.targets.index_select(0, rows)
    if not len(kept_rows):  # one row, whose target is ignored
        slots = whole.slots.new_zeros(1)
        targets = whole.targets.new_full((1,), IGNORE_INDEX)

    place_of_token = places.index_select(0, whole.token_slots)
    fields = {name: getattr(whole, name) for name in Prefixes.__slots__}
    fields |= {
        "token_slots": place_of_token.clamp(min=0),
        "token_rows": numbers.index_select(0, whole.token_rows),
        "slots": slots,
        "targets": targets,
    }
    return ShardPrefixes(**fields, here=place_of_token >= 0)


class SharedShardBoundaries(PrefixBoundaries, ShardBoundaries):
    """The boundaries of one rank's slots of a pack with shared prefixes; its entries are fragments."""

    __slots__ = ("prefixes",)

    prefixes: ShardPrefixes
    layout: SharedLayout

    @classmethod
    def of_shared(cls, shard: SharedLayout) -> SharedShardBoundaries:
        """Make the boundaries of the shard of a layout."""
        whole = shard.whole
        lengths = shard.fragments.stop - shard.fragments.start
        boundaries = cls(
            offsets=shard.put(offsets_of(lengths)),
            slots=shard.local_slots,
            max_seqlen=int(lengths.max()),
            lengths=lengths.tolist(),
            sequence_lengths=whole.sequence_lengths,
            longest=whole.longest,
        )
        boundaries._set(layout=shard, prefixes=prefixes_of_rank(shard))
        return boundaries

    def call(self, layer: object = None, *, causal: bool = True, chunk: int | None = None) -> KernelCall:
        """Return the offsets of the shard, and the layout by which attention gathers keys."""
        if chunk is not None:
            self.require("chunked", layer)
        return super().call(layer, causal=causal)

    def require(self, need: Need, layer: object) -> None:
        """Raise ValueError if what needs something does not run on a shard of shared prefixes."""
        if need == "all_tokens":
            raise ValueError(
                f"{layer} got one rank's shard of a pack whose sequences share prefixes, and other ranks "
                "predict some of its tokens. Set share_prefixes=False or context_parallel_size=1."
            )
        super().require(need, layer)

    def members(self, count: int) -> tuple[Tensor, Tensor | None]:
        """Return every token's sequence, ``count`` for the tokens of other ranks; and its slot."""
        sequences, slots = super().members(count)
        return sequences.where(self.prefixes.here, count), slots

    @property
    def longest_entry(self) -> int:
        """Return the keys of the longest leaf of the pack, or the slots of the pad at the end."""
        return self.layout.whole.longest_entry

    @property
    def real_slots(self) -> Tensor:
        """Return which slots hold tokens, bool ``[N]``."""
        return self.part(self.layout.whole.real_slots)

    def unpack(self, rows: Tensor, *, single: bool) -> list[Tensor]:
        """Gather rows of slots of all ranks and split them into sequences; a collective."""
        self.check_rows(rows)
        return self.layout.whole.unpack(self.whole(rows), single=True)
