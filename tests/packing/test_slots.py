import numpy as np
import pytest

from lightning_thd.alignment import Alignment
from lightning_thd.packing.bins import best_fit
from lightning_thd.packing.lengths import Slots, make_slots


def test_worked_value() -> None:
    slots = make_slots(100, Alignment(sequence_multiple=8, total_multiple=32))
    assert slots == Slots(usable=96, multiple=8)
    assert slots.padded(np.array([1, 8, 13])).tolist() == [8, 8, 16]
    assert make_slots(100, None) == Slots(usable=100, multiple=1)


def test_padded_packs_are_those_of_the_padded_lengths() -> None:
    lengths = np.random.default_rng(0).integers(1, 90, 200)
    slots = make_slots(100, Alignment(sequence_multiple=8, total_multiple=32))
    packs = best_fit(slots.padded(lengths), slots)
    assert packs.totals(slots.padded(lengths)).max() <= 96
    assert sorted(packs.indices) == list(range(200))


def test_what_is_too_long_gets_a_pack_of_its_own() -> None:
    packs = best_fit(np.array([30, 4, 50, 4]), Slots(usable=8, multiple=2))
    assert sorted(sorted(pack.tolist()) for pack in packs) == [[0], [1, 3], [2]]


def test_refuses_a_capacity_below_the_alignment() -> None:
    with pytest.raises(ValueError, match=r"capacity=31 is below total_multiple=32.*Raise capacity to 32"):
        make_slots(31, Alignment(sequence_multiple=8, total_multiple=32))
