"""Ranks get equal work, microstep by microstep; nothing is lost or over the capacity."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.balance import bound
from lightning_thd.packing import Cost, balance
from lightning_thd.packing.balancing import Problem, assign_bins, exchange, scheduled_bins
from lightning_thd.packing.lengths import Slots

from .shapes import draw

COST = Cost(linear=50, quadratic=1)


def waited(plan: list[list[list[int]]], lengths: list[int], cost: Cost = COST) -> float:
    """Work of the slowest rank, summed over the microsteps."""
    work = cost(lengths)
    return sum(max(work[rank[step]].sum() for rank in plan) for step in range(len(plan[0])))


@given(
    lengths=st.lists(st.integers(1, 64), max_size=50),
    dp=st.integers(1, 9),
    extra=st.integers(0, 3) | st.none(),
)
def test_nothing_is_lost_nothing_too_long_nothing_uneven(
    lengths: list[int], dp: int, extra: int | None
) -> None:
    plan = balance(lengths, 64, dp=dp, cost=COST)
    if extra is not None:
        plan = balance(lengths, 64, dp=dp, cost=COST, num_microbatches=len(plan[0]) + extra)
    assert len(plan) == dp
    assert len({len(rank) for rank in plan}) == 1
    bins = [bin_ for rank in plan for bin_ in rank]
    assert sorted(i for bin_ in bins for i in bin_) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in bin_) for bin_ in bins) <= 64


def test_small_steps_are_as_even_as_trying_everything_within_a_few_per_cent() -> None:
    ratios = []
    for seed in range(30):
        lengths = np.random.default_rng(seed).integers(1, 40, 7)
        owners = itertools.product(range(2), repeat=7)
        work = COST(lengths)
        best = min(max(work[np.array(o) == 0].sum(), work[np.array(o) == 1].sum()) for o in owners)
        ratios.append(waited(balance(lengths, 1_000, dp=2, cost=COST), lengths) / best)
    assert min(ratios) >= 1 - 1e-12
    assert np.mean(ratios) < 1.03  # longest first is at most 7/6 off for two bins (Graham 1969)
    assert max(ratios) <= 7 / 6 + 1e-12


@given(
    lengths=st.lists(st.integers(1, 32), min_size=1, max_size=60),
    dp=st.integers(1, 5),
    groups=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_exchanges_never_wait_for_more_nor_break_the_cap(
    lengths: list[int], dp: int, groups: int, seed: int
) -> None:
    sizes = np.array(lengths)
    work = sizes * (40.0 + sizes)
    before = np.random.default_rng(seed).integers(0, dp * groups, len(sizes))
    cap = int(np.bincount(before, weights=sizes).max())
    after = before.copy()
    exchange(Problem(sizes, 0 * sizes, work, Slots(usable=cap, multiple=1), dp), after, groups)
    assert ((after >= 0) & (after < dp * groups)).all()
    assert np.bincount(after, weights=sizes).max() <= cap

    def as_grouped(owner: np.ndarray) -> float:
        return np.bincount(owner, weights=work, minlength=dp * groups).reshape(groups, dp).max(1).sum()

    assert as_grouped(after) <= as_grouped(before) * (1 + 1e-12)


# The goals of the benchmark, and where the longest sequences fill a pack by themselves what we reach.
@pytest.mark.parametrize(
    ("shape", "dp", "capacity", "most"),
    [
        ("long", 8, 8192, 1.02),
        ("long", 64, 8192, 1.035),
        ("chat", 8, 32_768, 1.02),
        ("chat", 64, 8192, 1.02),
        ("chat", 64, 32_768, 1.02),
    ],
)
def test_steps_of_512_are_even(shape: str, dp: int, capacity: int, most: float) -> None:
    cost = Cost(linear=57_256, quadratic=1)  # Llama-3.1-8B
    ratios = []
    for seed in range(5):
        lengths = draw(shape, 512, seed=seed)
        plan = balance(lengths, capacity, dp=dp, cost=cost)
        assert max(lengths[bin_].sum() for rank in plan for bin_ in rank) <= capacity
        ratios.append(waited(plan, lengths, cost) * dp / cost(lengths).sum())
    assert np.mean(ratios) <= most


def test_packs_that_must_be_full_to_the_last_slot_are_found() -> None:
    # Longest first runs into the cap here; best fit does not.
    lengths = [6, 4] * 5 + [7, 3] * 2 + [5, 3, 2]
    plan = balance(lengths, 10, dp=2, cost=COST)
    assert [len(rank) for rank in plan] == [4, 4]
    assert all(sum(lengths[i] for i in bin_) == 10 for rank in plan for bin_ in rank)


def test_two_microbatches_are_found_where_best_fit_needs_three() -> None:
    # Best fit begins with 13 and 9.
    plan = balance([8, 13, 3, 9, 9, 6], 24, dp=1, cost=COST, num_microbatches=2)
    assert sorted(sorted(bin_.tolist()) for bin_ in plan[0]) == [[0, 1, 2], [3, 4, 5]]


def test_the_rank_with_the_least_work_gets_the_heaviest_bin_of_a_microstep() -> None:
    # Microsteps {9, 8}, {6, 5}, {2, 1}: the rank that had 8 gets 6, and so on.
    bins_of_ranks = assign_bins(np.array([1.0, 9.0, 8.0, 2.0, 5.0, 6.0]), 2).reshape(2, 3)
    assert bins_of_ranks.tolist() == [[1, 4, 3], [2, 5, 0]]


def test_the_longest_sequence_of_a_microbatch_is_first_and_equal_ones_keep_their_order() -> None:
    lengths = np.random.default_rng(0).integers(58, 71, 128)
    for rank in balance(lengths, 1_024, dp=2):
        for microbatch in rank:
            assert microbatch.tolist() == sorted(microbatch.tolist(), key=lambda i: (-lengths[i], i))


def test_fewer_sequences_than_ranks_leave_empty_microbatches() -> None:
    assert sorted(len(rank[0]) for rank in balance([5, 3], 8, dp=4)) == [0, 0, 1, 1]


SLOTS = Slots(usable=8, multiple=1)


def scheduled(plan: list[list[list[int]]]) -> object:
    return scheduled_bins(lambda *_, **__: plan, np.array([4, 3, 5]), SLOTS, dp=2, cost=COST)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: balance([3, 9], 8, dp=1), "Sequence 1 has 9 tokens but capacity=8"),
        (lambda: balance([3], 8, dp=0), "dp=0; wanted 1 or more"),
        (lambda: balance([3], 8, dp=1, num_microbatches=0), "num_microbatches=0; wanted"),
        (lambda: balance([8] * 5, 8, dp=2, num_microbatches=2), "need 5 packs.*has 4. Pass"),
        (lambda: scheduled([[[0, 1, 2]]]), r"gave 1 ranks \[1\] microbatches; wanted 2 with equally many"),
        (lambda: scheduled([[[0], [1]], [[2]]]), r"\[1, 2\] microbatches; wanted 2 with equally many"),
        (lambda: scheduled([[], []]), r"gave 2 ranks \[0\] microbatches"),
        (lambda: scheduled([[[0, 1]], [[]]]), "must use each of 3 positions once"),
        (lambda: scheduled([[[0, 1]], [[1, 2]]]), "must use each of 3 positions once"),
        (lambda: scheduled([[[0, 1]], [[2, -1]]]), "must use each of 3 positions once"),
        (lambda: scheduled([[[1, 2, 0]], [[]]]), "12 slots in microbatch 0 of rank 0, above the 8"),
    ],
)
def test_says_what_is_wrong(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_no_plan_is_below_the_bound_that_the_benchmark_prints() -> None:
    cost = Cost(linear=20, quadratic=1)
    tight = 0

    for seed in range(5):
        lengths = np.random.default_rng(seed).integers(1, 11, 6)
        work = cost(lengths)
        best = np.inf
        least = bound(lengths, 10, 2, cost)
        for bins in (2, 4, 6):
            for owner in itertools.product(range(bins), repeat=6):
                if np.bincount(owner, weights=lengths).max() <= 10:
                    totals = np.sort(np.bincount(owner, weights=work, minlength=bins))[::-1]
                    best = min(best, totals[::2].sum() * 2 / work.sum())
        if np.isfinite(best):
            assert least <= best + 1e-12
            tight += best / least < 1.05

    assert tight >= 1  # it is near enough to be of use
