"""Packs are those of placing the sequences one after the other, and about as full as they can be."""

from typing import Any

import numpy as np
import pytest

from lightning_thd.alignment import Alignment
from lightning_thd.packing import pack_lengths
from lightning_thd.packing.bins import best_fit, count_packs
from lightning_thd.packing.lengths import Slots, make_slots

from .shapes import draw


def one_after_the_other(
    lengths: list[int], capacity: int, algorithm: str, limit: int | None = None
) -> list[tuple[int, int]]:
    """Place the sequences singly, searching all packs each time: (room, sequences) of every pack."""
    packs = []
    ordered = lengths if algorithm == "next_fit" else sorted(lengths, reverse=True)
    for length in ordered:
        fits = [(room, held, i) for i, (room, held) in enumerate(packs) if room >= length and held != limit]
        last = [fit for fit in fits if fit[2] == len(packs) - 1]
        fits = last if algorithm == "next_fit" else sorted(fits)
        if fits:
            room, held, i = fits[0]
            packs[i] = (room - length, held + 1)
        else:
            packs.append((capacity - length, 1))
    return sorted(packs)


def random_case(number: int) -> tuple[list[int], int]:
    rng = np.random.default_rng(number)
    capacity = int(rng.integers(1, 250))
    longest = int(rng.integers(1, capacity + 1))
    return rng.integers(1, longest + 1, int(rng.integers(1, 200))).tolist(), capacity


@pytest.mark.parametrize("algorithm", ["bfd", "next_fit"])
def test_same_packs_as_placing_one_after_the_other(algorithm: str) -> None:
    for number in range(100):
        lengths, capacity = random_case(number)
        limit = None if number % 2 else number % 5 + 1
        packs = pack_lengths(lengths, capacity, algorithm=algorithm, max_sequences=limit)
        rooms = sorted((capacity - sum(lengths[i] for i in pack), len(pack)) for pack in packs)
        assert rooms == one_after_the_other(lengths, capacity, algorithm, limit), f"random case {number}"
        assert sorted(packs.indices) == list(range(len(lengths)))
        assert limit or algorithm == "next_fit" or count_packs(np.array(lengths), capacity) == len(packs)
        assert (packs.totals(lengths) <= capacity).all()


def test_lengths_past_16_bits_are_sorted_too() -> None:
    assert [pack.tolist() for pack in pack_lengths([5, 3, 4, 4], 8)] == [[0, 1], [2, 3]]
    packs = pack_lengths([70_000, 5, 1_000_000, 70_000, 6, 65_536, 131_072], 1_000_000)
    assert [pack.tolist() for pack in packs] == [[2], [6, 0, 3, 5, 4, 1]]


def test_no_sequences_make_no_packs_which_count_as_full() -> None:
    packs = pack_lengths([], 8)
    assert len(packs) == 0
    assert packs.fill([], 8) == 1.0


@pytest.mark.parametrize("count", [2, 4])
def test_totals_refuse_another_number_of_values_than_of_sequences(count: int) -> None:
    packs = pack_lengths([5, 3, 4], 8)
    with pytest.raises(ValueError, match=f"values has {count} numbers for 3 sequences. Pass one"):
        packs.totals([1] * count)


# Best fit of one after the other reaches .990 and 1.000 of packs of 8k slots; the rest is for the draw.
@pytest.mark.parametrize(("shape", "least"), [("long", 0.988), ("chat", 0.996)])
def test_packs_are_about_as_full_as_they_can_be(shape: str, least: float) -> None:
    lengths = draw(shape, 10_000)
    assert pack_lengths(lengths, 8192).fill(lengths, 8192) > least


def test_padded_sequences_fit_the_usable_slots() -> None:
    slots = make_slots(100, Alignment(sequence_multiple=8, total_multiple=32))
    assert slots == Slots(usable=96, multiple=8)
    padded = slots.padded(np.random.default_rng(0).integers(1, 90, 200))
    packs = best_fit(padded, slots)
    assert packs.totals(padded).max() <= 96
    assert sorted(packs.indices) == list(range(200))


def test_a_sequence_that_is_too_long_has_a_pack_of_its_own() -> None:
    packs = best_fit(np.array([30, 4, 50, 4]), Slots(usable=8, multiple=2))
    assert sorted(sorted(pack.tolist()) for pack in packs) == [[0], [1, 3], [2]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [3, 9]}, "Sequence 1 has 9 tokens but capacity=8. Raise"),
        ({"capacity": 0}, "capacity=0; wanted 1 or more"),
        ({"algorithm": "best"}, "'best'; wanted one of bfd, next_fit"),
        ({"max_sequences": 0}, "max_sequences=0; wanted 1 or more"),
        ({"lengths": [0]}, "lengths.0. is 0; wanted 1 or more"),
    ],
)
def test_says_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_lengths(**{"lengths": [3], "capacity": 8, **changes})
