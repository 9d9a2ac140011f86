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
        found = sorted((capacity - sum(lengths[i] for i in pack), len(pack)) for pack in packs)
        assert found == one_after_the_other(lengths, capacity, algorithm, limit), number
        assert sorted(packs.indices) == list(range(len(lengths)))
        assert limit or algorithm == "next_fit" or count_packs(np.array(lengths), capacity) == len(packs)
        assert (packs.totals(lengths) <= capacity).all()


def test_packs_of_large_numbers_of_none_and_of_what_is_padded() -> None:
    assert [pack.tolist() for pack in pack_lengths([5, 3, 4, 4], 8)] == [[0, 1], [2, 3]]
    packs = pack_lengths([70_000, 5, 1_000_000, 70_000, 6, 65_536, 131_072], 1_000_000)  # past 16 bits
    assert [pack.tolist() for pack in packs] == [[2], [6, 0, 3, 5, 4, 1]]
    assert (len(pack_lengths([], 8)), pack_lengths([], 8).fill([], 8)) == (0, 1.0)
    for values in ([1] * 6, [1] * 8):
        with pytest.raises(ValueError, match=f"values has {len(values)} numbers for 7 sequences. Pass one"):
            packs.totals(values)
    # Item-wise best fit reaches .990 and 1.000 of 8k packs; two in a thousand for the draw.
    for name, least in (("long", 0.988), ("chat", 0.996)):
        lengths = draw(name, 10_000)
        assert pack_lengths(lengths, 8192).fill(lengths, 8192) > least
    slots = make_slots(100, Alignment(sequence_multiple=8, total_multiple=32))
    assert slots == Slots(usable=96, multiple=8)
    padded = slots.padded(np.random.default_rng(0).integers(1, 90, 200))
    packs = best_fit(padded, slots)
    assert packs.totals(padded).max() <= 96
    assert sorted(packs.indices) == list(range(200))
    packs = best_fit(np.array([30, 4, 50, 4]), Slots(usable=8, multiple=2))  # too long: a pack of its own
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
