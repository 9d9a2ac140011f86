"""What ranks need of each other, against sets counted slot by slot."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_thd.parallel.context.needs import need_counts, needed_rows, plan_block, plan_exchange
from lightning_thd.parallel.context.partition import (
    causal_work,
    held_lengths,
    held_real_lengths,
    rank_indices,
)

LAYOUTS = ("dual_chunk", "contiguous", "striped", "mixed")


def owners(lengths: list[int], cp: int, layout: str) -> dict[int, tuple[int, int]]:
    """Slot of the pack -> its rank and its row there."""
    return {
        int(slot): (rank, row)
        for rank in range(cp)
        for row, slot in enumerate(rank_indices(lengths, cp=cp, rank=rank, layout=layout))
    }


def seen_pairs(lengths: list[int], *, causal: bool, left: int) -> set[tuple[int, int]]:
    pairs = set()
    first = 0
    for length in lengths:
        for q, k in product(range(length), range(length)):
            if (not causal or k <= q) and (left < 0 or k >= q - left):
                pairs.add((first + q, first + k))
        first += length
    return pairs


@st.composite
def packs(draw: st.DrawFn) -> tuple[list[int], int, str]:
    cp = draw(st.sampled_from([2, 3, 4]))
    layout = draw(st.sampled_from(LAYOUTS))
    multiple = 2 * cp if layout in ("dual_chunk", "mixed") else 1
    lengths = [n * multiple for n in draw(st.lists(st.integers(0, 24 // multiple), min_size=1, max_size=6))]
    lengths.append(-sum(lengths) % (cp * multiple))
    return lengths, cp, layout


@settings(max_examples=60, deadline=None)
@given(pack=packs(), causal=st.booleans(), left=st.sampled_from([-1, 0, 1, 5]))
def test_rows_are_those_that_some_query_sees(
    pack: tuple[list[int], int, str], causal: bool, left: int
) -> None:
    lengths, cp, layout = pack
    left = left if causal else -1
    owner = owners(lengths, cp, layout)
    expected: dict[tuple[int, int], set[int]] = {pair: set() for pair in product(range(cp), range(cp))}
    for q, k in seen_pairs(lengths, causal=causal, left=left):
        expected[owner[q][0], owner[k][0]].add(owner[k][1])
    counts = need_counts(lengths, cp=cp, layout=layout, causal=causal, left=left)
    for (rank, source), rows in expected.items():
        if rank != source:
            needed = needed_rows(
                lengths, cp=cp, rank=rank, source=source, layout=layout, causal=causal, left=left
            )
            assert needed.tolist() == sorted(rows)
            assert counts[rank, source] == len(rows)


@settings(max_examples=60, deadline=None)
@given(pack=packs(), causal=st.booleans(), left=st.sampled_from([-1, 0, 1, 5]))
def test_blocks_hold_every_pair_once(pack: tuple[list[int], int, str], causal: bool, left: int) -> None:
    lengths, cp, layout = pack
    left = left if causal and layout == "striped" else -1
    pairs: list[tuple[int, int]] = []

    for rank, source in product(range(cp), range(cp)):
        block = plan_block(lengths, cp=cp, rank=rank, source=source, layout=layout, causal=causal, left=left)
        if block is None:
            continue
        slots_of_rank = rank_indices(lengths, cp=cp, rank=rank, layout=layout)
        queries = slots_of_rank if block.q_rows is None else slots_of_rank[block.q_rows]
        keys = rank_indices(lengths, cp=cp, rank=source, layout=layout)[block.kv_rows]
        assert len(queries) == block.q_lengths.sum()
        assert len(keys) == block.kv_lengths.sum()
        for q_part, k_part in zip(
            np.split(queries, np.cumsum(block.q_lengths)[:-1]),
            np.split(keys, np.cumsum(block.kv_lengths)[:-1]),
            strict=True,
        ):
            shift = len(k_part) - len(q_part)  # bottom-right
            for i, j in product(range(len(q_part)), range(len(k_part))):
                if (block.right < 0 or j <= i + shift) and (block.left < 0 or j >= i + shift - block.left):
                    pairs.append((int(q_part[i]), int(k_part[j])))

    assert len(pairs) == len(set(pairs))
    assert set(pairs) == seen_pairs(lengths, causal=causal, left=left)


@settings(max_examples=30, deadline=None)
@given(pack=packs(), left=st.sampled_from([-1, 3]))
def test_an_exchange_brings_each_row_to_its_place(pack: tuple[list[int], int, str], left: int) -> None:
    lengths, cp, layout = pack
    shards = [rank_indices(lengths, cp=cp, rank=rank, layout=layout) for rank in range(cp)]
    plans = [plan_exchange(lengths, cp=cp, rank=rank, layout=layout, left=left) for rank in range(cp)]
    for rank, plan in enumerate(plans):
        received = []
        for source, other in enumerate(plans):
            cuts = np.cumsum([0, *other.send_counts])
            received.append(shards[source][other.send_rows[cuts[rank] : cuts[rank + 1]]])
            assert len(received[-1]) == plan.receive_counts[source]
        rows = np.concatenate([shards[rank], *received])
        has_row = plan.row_of_slot >= 0
        assert (rows[plan.row_of_slot[has_row]] == np.flatnonzero(has_row)).all()
        assert has_row.sum() == len(rows)
        assert plan.group_rows == sum(sum(other.receive_counts) for other in plans)


def test_striped_shards() -> None:
    lengths = [5, 0, 9, 2]
    cp = 4
    held = [held_lengths(lengths, cp=cp, rank=rank, layout="striped") for rank in range(cp)]
    assert np.sum(held, axis=0).tolist() == lengths
    real = [held_real_lengths([3, 0, 9], lengths, cp=cp, rank=rank, layout="striped") for rank in range(cp)]
    assert np.sum(real, axis=0).tolist() == [3, 0, 9, 2]
    work = causal_work([64], cp=4, layout="striped")
    assert work.sum() == 64 * 65 / 2
    assert work.max() / work.mean() < 1.06
    with pytest.raises(ValueError, match="10 slots cannot be cut into 4 equal shards"):
        rank_indices([10], cp=4, rank=0, layout="striped")
