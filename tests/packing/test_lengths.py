import numpy as np
import pytest
import torch

from lightning_thd.packing.entries import open_lengths
from lightning_thd.packing.lengths import as_lengths, check_count


@pytest.mark.parametrize(
    "given", [[3, 4], (3, 4), np.array([3, 4], np.uint16), torch.tensor([3, 4], dtype=torch.int32)]
)
def test_takes_any_container_of_ints(given: object) -> None:
    values = as_lengths(given)
    assert values.dtype == np.int64
    assert values.tolist() == [3, 4]


def test_takes_none_at_all() -> None:
    assert as_lengths([]).dtype == np.int64


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([[1, 2]], r"shape \(1, 2\).*one integer a sequence"),
        ([1.0, 2.0], "type float64.*Pass integers"),
        ([True, False], "type bool.*Pass integers"),
        ([4, 0, 3], "Sequence 1 has 0 tokens.*least allowed is 1"),
        ([4, -2], "Sequence 1 has -2 tokens"),
    ],
)
def test_refuses_what_are_no_lengths(given: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_lengths(given)


@pytest.mark.parametrize("given", ["345", {0: 3}, {3, 4}, (n for n in (3, 4)), None])
def test_refuses_what_holds_no_numbers_by_its_type(given: object) -> None:
    with pytest.raises(TypeError, match=rf"lengths is a {type(given).__name__} that is no array of numbers"):
        as_lengths(given)
    with pytest.raises(ValueError, match=rf"lengths is a {type(given).__name__}\. Pass an array of ints"):
        open_lengths(given)


@pytest.mark.parametrize("value", [0, -3, 1.5, True, None, "8"])
def test_refuses_what_is_no_count(value: object) -> None:
    with pytest.raises(ValueError, match=r"^window=.*whole number, at least 1. Say why\.$"):
        check_count("window", value, "Say why.")


@pytest.mark.parametrize("value", [1, np.int32(7)])
def test_accepts_counts(value: object) -> None:
    check_count("window", value, "")
