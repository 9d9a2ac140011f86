import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_thd.packing import pack_lengths
from lightning_thd.packing.bins import count_packs

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


def test_counting_gives_the_number_of_packs() -> None:
    for number in range(100):
        lengths, capacity = random_case(number)
        assert count_packs(np.array(lengths), capacity) == len(pack_lengths(lengths, capacity))
    assert count_packs(np.empty(0, np.int64), 8) == 0


@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=40),
    algorithm=st.sampled_from(["bfd", "next_fit"]),
    limit=st.none() | st.integers(1, 4) | st.just(2**70),
)
def test_each_sequence_lands_in_one_pack_within_budget(
    lengths: list[int], algorithm: str, limit: int | None
) -> None:
    packs = pack_lengths(lengths, 64, algorithm=algorithm, max_sequences=limit)
    assert sorted(packs.indices) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in pack) <= 64 for pack in packs)
    assert all(1 <= len(pack) <= (limit or 40) for pack in packs)


def test_worked_value() -> None:
    assert [pack.tolist() for pack in pack_lengths([5, 3, 4, 4], 8)] == [[0, 1], [2, 3]]


def test_best_fit_fills_the_packs_of_the_two_distributions() -> None:
    # Item-wise best fit reaches .990 and 1.000 of 8k packs on 10,000 sequences; two in a thousand for the
    # draw.
    assert pack_lengths(draw("long", 10_000), 8192).fill(draw("long", 10_000), 8192) > 0.988
    assert pack_lengths(draw("chat", 10_000), 8192).fill(draw("chat", 10_000), 8192) > 0.996


def test_no_sequences_make_no_packs() -> None:
    packs = pack_lengths([], 8)
    assert len(packs) == 0
    assert packs.fill([], 8) == 1.0
    assert packs.totals([]).tolist() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [3, 9], "capacity": 8}, "Sequence 1 has 9 tokens but capacity=8.*oversize="),
        ({"lengths": [3], "capacity": 0}, "capacity=0; wanted 1 or more"),
        ({"lengths": [3], "capacity": 8, "algorithm": "best"}, "'best'; wanted one of bfd, next_fit"),
        ({"lengths": [3], "capacity": 8, "max_sequences": 0}, "max_sequences=0; wanted 1 or more"),
        ({"lengths": [0], "capacity": 8}, "lengths.0. is 0; wanted 1 or more"),
    ],
)
def test_says_what_is_wrong(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_lengths(**arguments)


def test_lengths_beyond_sixteen_bits_sort_as_well() -> None:
    lengths = [70_000, 5, 1_000_000, 70_000, 6, 65_536, 131_072]
    packs = pack_lengths(lengths, 1_000_000)
    assert len(packs) == 2
    assert packs[0].tolist() == [2]
    assert packs[1].tolist() == [6, 0, 3, 5, 4, 1]
