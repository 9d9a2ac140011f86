"""Every slot lies on one rank, where Transformer Engine would put it, with the keys its queries see."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_thd.parallel.context import partition

LAYOUTS = ["dual_chunk", "contiguous", "mixed"]


def te_rule(cu_seqlens_padded: list[int], cp: int, rank: int) -> list[int]:
    """thd_get_partitioned_indices, written out slot by slot."""
    slots = []
    for begin, end in pairwise(cu_seqlens_padded):
        chunk = (end - begin) // (2 * cp)
        for number in (rank, 2 * cp - 1 - rank):
            slots += range(begin + number * chunk, begin + (number + 1) * chunk)
    return slots


@given(chunks=st.lists(st.integers(0, 9), min_size=1, max_size=12), cp=st.integers(1, 8))
def test_dual_chunk_is_the_rule_of_transformer_engine(chunks: list[int], cp: int) -> None:
    lengths = [2 * cp * n for n in chunks]
    offsets = [0, *np.cumsum(lengths).tolist()]
    for rank in range(cp):
        slots = partition.rank_indices(lengths, cp=cp, rank=rank, layout="dual_chunk").tolist()
        assert slots == te_rule(offsets, cp, rank)


@given(chunks=st.lists(st.integers(0, 9), min_size=1, max_size=12), cp=st.integers(1, 8), data=st.data())
def test_all_slots_lie_on_one_rank_and_come_back(chunks: list[int], cp: int, data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(LAYOUTS))
    lengths = [2 * cp * n for n in chunks]
    shards = [partition.rank_indices(lengths, cp=cp, rank=rank, layout=layout) for rank in range(cp)]
    assert len({len(shard) for shard in shards}) == 1
    gathered = np.concatenate(shards)
    assert sorted(gathered.tolist()) == list(range(sum(lengths)))
    restore = partition.restore_indices(lengths, cp=cp, layout=layout)
    assert gathered[restore].tolist() == list(range(sum(lengths)))


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    cp=st.sampled_from([1, 2, 4]),
    layout=st.sampled_from(LAYOUTS),
    causal=st.booleans(),
    left=st.sampled_from([-1, 0, 3, 11]),
)
def test_calls_hold_exactly_the_keys_a_query_may_see(
    lengths: list[int], cp: int, layout: str, causal: bool, left: int
) -> None:
    padded = [-(-n // (2 * cp)) * 2 * cp for n in lengths]
    owner = np.repeat(np.arange(len(padded)), padded)
    left = left if causal else -1

    for rank in range(cp):
        plan = partition.plan_keys(padded, cp=cp, rank=rank, layout=layout, causal=causal, left=left)
        slots_of_rank = partition.rank_indices(padded, cp=cp, rank=rank, layout=layout)
        assert plan.q_lengths.sum() == len(slots_of_rank)
        queries = np.split(slots_of_rank, np.cumsum(plan.q_lengths)[:-1])
        keys = np.split(plan.kv_slots, np.cumsum(plan.kv_lengths)[:-1])
        for q, k in zip(queries, keys, strict=True):
            for i, slot in enumerate(q):
                last = i + len(k) - len(q)
                seen = k[: last + 1] if causal else k
                seen = seen if left < 0 else seen[max(0, last - left) :]
                whole = np.flatnonzero(owner == owner[slot])
                expected = whole[whole <= slot] if causal else whole
                expected = expected if left < 0 else expected[expected >= slot - left]
                assert seen.tolist() == expected.tolist()


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8), cp=st.integers(1, 4), data=st.data())
def test_real_tokens_are_shared_out(lengths: list[int], cp: int, data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(LAYOUTS))
    padded = [-(-n // (2 * cp)) * 2 * cp for n in lengths]
    parts = [
        partition.held_real_lengths(lengths, padded, cp=cp, rank=rank, layout=layout) for rank in range(cp)
    ]
    assert np.sum(parts, axis=0).tolist() == lengths


@pytest.mark.parametrize(
    ("lengths", "arguments", "message"),
    [
        (
            [8, 6],
            {"cp": 2, "rank": 0, "layout": "dual_chunk"},
            r"Sequence 1 has 6 slots.*multiple of 4.*align",
        ),
        ([8, 5], {"cp": 2, "rank": 0, "layout": "contiguous"}, r"pack of 13 slots.*multiple of 2.*align"),
        ([8], {"cp": 2, "rank": 2, "layout": "contiguous"}, r"rank=2 of cp=2"),
        ([8], {"cp": 2, "rank": 0, "layout": "zigzag"}, r"layout='zigzag'; wanted one of dual_chunk"),
    ],
)
def test_messages(lengths: list[int], arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition.rank_indices(lengths, **arguments)


def test_mixed_cuts_long_sequences_alone() -> None:
    how = {"cp": 2, "layout": "mixed"}
    slots = [partition.rank_indices([16, 4, 4, 8], rank=rank, **how).tolist() for rank in range(2)]
    assert slots == [[0, 1, 2, 3, 12, 13, 14, 15, *range(24, 32)], [*range(4, 12), *range(16, 24)]]
    # No rank has room for the last of the short ones: it is cut where room is left.
    held = [partition.held_lengths([12] * 5, rank=rank, **how).tolist() for rank in range(2)]
    assert held == [[12, 0, 12, 0, 6], [0, 12, 0, 12, 6]]
    with pytest.raises(ValueError, match="Sequence 1 has 6 slots; layout='mixed' over 2.*multiple of 4"):
        partition.rank_indices([8, 6], rank=0, **how)
