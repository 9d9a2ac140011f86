"""Shuffles hold every entry once, are as good as random ones, and never change between releases."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_thd.packing.permutation import derive_key, permute, shuffled, spread


@given(st.integers(1, 10**12), st.integers(0, 2**64 - 1), st.data())
def test_any_position_alone_gives_the_same(total: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=5))
    together = permute(positions, total, key=key)
    assert together.tolist() == [int(permute([p], total, key=key)[0]) for p in positions]
    assert len(set(together.tolist())) == len(set(positions))
    assert ((together >= 0) & (together < total)).all()


@pytest.mark.parametrize("total", [1, 2, 3, 100, 4096, 4097, 4099, 65_536, 65_537, 300_007])
def test_is_a_permutation_and_another_one_for_every_key(total: int) -> None:
    entries = permute(np.arange(total), total, key=derive_key(total))
    assert np.array_equal(np.sort(entries), np.arange(total))
    if total > 100:  # in small ones many entries stay by chance
        for key in (derive_key(0, total), derive_key(total, 0), derive_key(total, 0, 0)):
            assert (permute(np.arange(total), total, key=key) == entries).mean() < 0.01
    with pytest.raises(ValueError, match=f"a permutation of {total} entries"):
        permute([total], total, key=0)


@settings(max_examples=30)
@given(st.integers(1, 300), st.integers(1, 100), st.integers(0, 2**64 - 1))
def test_groups_that_are_spread_take_equal_shares_of_every_run(total: int, size: int, key: int) -> None:
    entries = spread(np.arange(total), total, size, key=key)
    assert np.array_equal(np.sort(entries), np.arange(total))
    for start in range(0, total, size):
        group = np.sort(entries[start : start + size])
        asked_alone = spread(np.arange(start, start + len(group)), total, size, key=key)
        assert np.array_equal(np.sort(asked_alone), group)
        for end in (total // 3, total // 2):  # sequences 0 to end
            expected = len(group) * end / total
            assert abs((group < end).sum() - expected) <= 1 + 1 / max(1, total // size)


def test_plans_outlive_releases() -> None:
    """Values written down once: a change of them would change every plan, and must raise _PLAN_VERSION."""
    entries = permute([0, 1, 2, 999_999], 1_000_000, key=derive_key(0, 1))
    assert entries.tolist() == [909074, 508427, 513082, 293744]
    assert shuffled(8, key=derive_key(7)).tolist() == [0, 6, 5, 7, 1, 2, 3, 4]


@pytest.mark.parametrize("total", [10, 6_000])
def test_every_entry_is_as_likely_at_every_position(total: int) -> None:
    """Chi-square of where 16 positions land over 4,000 keys, in ten bins: 9 degrees of freedom."""
    positions = np.linspace(0, total - 1, 16).astype(int)
    landed = np.array([permute(positions, total, key=derive_key(k)) for k in range(4_000)]) * 10 // total
    for column in landed.T:
        observed = np.bincount(column, minlength=10)
        chi_square = ((observed - 400) ** 2 / 400).sum()
        assert chi_square < 33.7  # one in 10,000 by chance; 16 columns, fixed keys
