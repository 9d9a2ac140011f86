import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_thd.packing.balance import exchange, fill_microsteps, waiting


def test_waiting_adds_the_heaviest_of_each_microstep() -> None:
    assert waiting(np.array([1.0, 9.0, 8.0, 2.0, 5.0, 6.0]), 2) == 9 + 6 + 2


@given(
    lengths=st.lists(st.integers(1, 32), min_size=1, max_size=60),
    dp=st.integers(1, 5),
    groups=st.integers(1, 6),
)
def test_a_plan_holds_everything_below_the_cap(lengths: list[int], dp: int, groups: int) -> None:
    sizes = np.array(lengths)
    work = sizes * (40.0 + sizes)
    owner = fill_microsteps(sizes, work, 32, dp=dp, num_microbatches=groups, enough=0.0)
    if owner is not None:
        assert ((owner >= 0) & (owner < dp * groups)).all()
        assert np.bincount(owner, weights=sizes).max() <= 32


def test_finds_a_plan_for_packs_nine_tenths_full() -> None:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(20):
        sizes = rng.integers(1, 500, 400)
        bins = 4 * int(np.ceil(sizes.sum() / (0.9 * 1_000 * 4)))
        owner = fill_microsteps(
            sizes, sizes * (4_000.0 + sizes), 1_000, dp=4, num_microbatches=bins // 4, enough=0.0
        )
        found.append(owner is not None)
    assert np.mean(found) == 1.0


def test_the_longest_are_left_together() -> None:
    """Four sequences of 10 and many of 1, 2, 3: one microstep of tens, the other filled evenly."""
    sizes = np.array([10] * 4 + [3] * 4 + [2] * 4 + [1] * 4)
    owner = fill_microsteps(sizes, sizes.astype(float), 12, dp=4, num_microbatches=2, enough=0.0)
    totals = np.bincount(owner, weights=sizes, minlength=8)
    assert sorted(totals.tolist()) == [6.0] * 4 + [10.0] * 4


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
    exchange(after, sizes, work, cap, dp=dp, num_microbatches=groups)
    assert ((after >= 0) & (after < dp * groups)).all()
    assert np.bincount(after, weights=sizes).max() <= cap

    def as_grouped(owner: np.ndarray) -> float:
        return np.bincount(owner, weights=work, minlength=dp * groups).reshape(groups, dp).max(1).sum()

    assert as_grouped(after) <= as_grouped(before) * (1 + 1e-12)


def test_exchanges_find_an_even_plan() -> None:
    """Two bins of 6 + 5 and 4 + 3 become 6 + 3 and 4 + 5; a bin of 9 alone gives nothing up."""
    sizes = np.array([6, 5, 4, 3])
    owner = np.array([0, 0, 1, 1])
    exchange(owner, sizes, sizes.astype(float), 100, dp=2, num_microbatches=1)
    assert np.bincount(owner, weights=sizes).tolist() == [9, 9]
    alone = np.array([0, 1, 1])
    exchange(alone, np.array([9, 2, 3]), np.array([9.0, 2.0, 3.0]), 100, dp=2, num_microbatches=1)
    assert alone.tolist() == [0, 1, 1]
