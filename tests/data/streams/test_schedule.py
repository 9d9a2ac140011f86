"""Steps planned from what ranks hold: whole, within the capacity, even, and fast for thousands of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_thd.data.streams.schedule import POOL, Scheduling, Table, plan_steps, work_of
from lightning_thd.packing import Cost, Packs, Sequences
from lightning_thd.packing.lengths import make_slots
from tests.packing.test_media import COST, PATCHES
from tests.packing.test_media import LENGTHS as IMAGE_LENGTHS


def pool_of(lengths: list[int] | np.ndarray, dp: int) -> Table:
    pool = np.zeros(len(lengths), POOL)
    pool["length"] = lengths
    pool["row"] = np.arange(len(lengths))
    pool["holder"] = np.arange(len(lengths)) % dp
    return pool


def scheduling(step: Packs | Sequences, dp: int, capacity: int, tail: str = "pad") -> Scheduling:
    return Scheduling(step=step, slots=make_slots(capacity, None), cost=Cost(), dp=dp, tail=tail)


@given(
    lengths=st.lists(st.integers(1, 30), max_size=60),
    dp=st.integers(1, 4),
    packs=st.booleans(),
    n=st.integers(1, 4),
    ended=st.booleans(),
    tail=st.sampled_from(["pad", "drop"]),
)
def test_what_is_planned_and_what_is_left_are_all_there_is(
    lengths: list[int], dp: int, packs: bool, n: int, ended: bool, tail: str
) -> None:
    how = scheduling(Packs(n * dp) if packs else Sequences(n), dp, 30, tail)
    pool = pool_of(lengths, dp)
    rows: list[int] = []

    while True:
        steps, pool = plan_steps(pool, how, ended=ended)
        if not steps:
            break
        for step in steps:
            rows += step.table["row"].tolist()
            sums = np.add.reduceat(np.append(step.table["length"], 0), step.offsets[:-1])
            assert (np.where(np.diff(step.offsets) > 0, sums, 0) <= 30).all()
            assert len(step.targets()) == len(step.table)
            assert not packs or step.microbatches == n
            assert packs or len(step.table) == n or (ended and tail == "pad")

    assert sorted([*rows, *pool["row"].tolist()]) == list(range(len(lengths)))
    assert len(pool) == 0 or not (ended and tail == "pad")


@pytest.mark.parametrize("step", [Sequences(128), Packs(16)])
def test_images_of_a_stream_are_bounded_in_packs_and_even_over_ranks(step: Packs | Sequences) -> None:
    pool = pool_of(IMAGE_LENGTHS, 8)
    dp = 8
    most = 40_000
    pool["patches"], pool["squares"] = PATCHES.T
    how = Scheduling(step=step, slots=make_slots(16_384, None, most), cost=COST, dp=dp)
    steps, _ = plan_steps(pool[:512], how, ended=False)
    for planned in steps:
        sums = np.add.reduceat(np.append(planned.table["patches"], 0), planned.offsets[:-1])
        assert 0.3 * most < sums.max() <= most
        summed = np.concatenate([[0.0], np.cumsum(work_of(planned.table, COST))])
        work = np.diff(summed[planned.offsets]).reshape(dp, -1)
        largest = work_of(planned.table, COST).max() * dp / work.sum()
        assert work.max(0).sum() * dp / work.sum() <= max(1.05, 1.02 * largest)
