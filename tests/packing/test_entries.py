import numpy as np
import pytest

from lightning_thd.packing.entries import (
    LengthSummary,
    make_entries,
    read_lengths,
    summarize,
)


def test_left_out_sequences_leave_no_gap() -> None:
    lengths = np.array([0, 5, 9, 3, 0, 9, 2, 9])
    entries = make_entries(lengths, summarize(lengths), limit=8, oversize="drop")
    assert entries.total == 3
    assert entries.indices(np.arange(3)).tolist() == [1, 3, 6]
    assert entries.counts == {
        "empty": 2, "dropped": 3, "truncated": 0, "split": 0, "own_pack": 0, "tokens_lost": 27,
    }  # fmt: skip


def test_the_digest_is_of_the_numbers_not_of_their_type() -> None:
    values = np.random.default_rng(0).integers(1, 1_000, 3_000_000)  # three blocks
    digests = {summarize(values.astype(kind)).digest for kind in (np.uint16, np.int32, np.int64)}
    assert len(digests) == 1
    for changed in (values[::-1], values[:-1], np.append(values[:-1], values[-1] + 1)):
        assert summarize(changed).digest not in digests


class Faulty:
    def __init__(self, answer: object, summary: LengthSummary | None = None) -> None:
        self.answer, self.summary = answer, summary

    def __len__(self) -> int:
        return 3

    def __getitem__(self, positions: object) -> object:
        return self.answer


@pytest.mark.parametrize("answer", [[1, 2], 7, [1.0, 2.0, 3.0], [[1, 2, 3]]])
def test_refuses_virtual_lengths_that_answer_wrongly(answer: object) -> None:
    with pytest.raises(ValueError, match=r"lengths\[...\] answered 3 positions with shape"):
        read_lengths(Faulty(answer), np.arange(3))


def test_refuses_a_summary_of_other_lengths() -> None:
    old = LengthSummary(count=4, total=9, shortest=1, longest=4, digest="")
    with pytest.raises(ValueError, match=r"made of 4 sequences, but there are 3. The lengths changed"):
        summarize(Faulty([1, 2, 3], old))
