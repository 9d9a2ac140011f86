"""The family of argument checks: what is taken, and the key words of what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_thd._checks import (
    choice,
    flags,
    host_ints,
    instance,
    int_tensor,
    real_number,
    refuse_missing,
    whole_number,
)

UNREADABLE = torch.ones(2, dtype=torch.int32, device="meta")
FLOATS, FLAGS = torch.tensor([1.0]), torch.tensor([True])


@pytest.mark.parametrize(
    "given",
    [
        [3, 4],
        (3, 4),
        np.array([3, 4], np.uint16),
        np.array([3, 4], object),
        torch.tensor([3, 4], dtype=torch.int32),
    ],
)
def test_any_container_of_ints_is_taken(given: object) -> None:
    values = host_ints(given, "lengths", least=3)
    assert values.dtype == np.int64
    assert values.tolist() == [3, 4]
    assert int_tensor(given, "lengths").tolist() == [3, 4]


def test_an_empty_list_holds_integers() -> None:
    assert host_ints([], "lengths", least=1).dtype == np.int64


def test_numbers_become_plain_ones() -> None:
    assert type(whole_number(np.int32(7), "n")) is int
    assert type(real_number(np.float32(0.5), "x", above=0, least=0.5)) is float
    assert type(real_number(2, "x")) is float


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "rows": (lambda: host_ints([[1, 2]], "x"), ValueError, r"x has shape \(1, 2\); wanted one row"),
    "ragged rows": (lambda: host_ints([[1, 2], [3]], "x"), ValueError, "x is no array of integers"),
    "floats": (lambda: host_ints([1, 2.5], "x"), ValueError, "x holds float64 values.*Pass integers"),
    "bools": (lambda: host_ints([True, False], "x"), ValueError, "x holds bool values"),
    "a float tensor": (lambda: host_ints(FLOATS, "x"), ValueError, "x holds torch.float32"),
    "a bool tensor": (lambda: int_tensor(FLAGS, "x"), ValueError, r"x is torch.bool.*\.to\(torch.int32\)"),
    "the meta device": (lambda: host_ints(UNREADABLE, "x"), ValueError, "meta device, which holds no values"),
    "too low": (lambda: host_ints([4, 0, 3], "x", least=1), ValueError, r"x\[1\] is 0; wanted 1 or more"),
    "past int64": (lambda: host_ints([1, 2**63], "x"), ValueError, "x holds (float64|9223372036854775808)"),
    "far past int64": (lambda: host_ints([2**70], "x"), ValueError, f"x holds {2**70}, past int64"),
    "a text": (lambda: host_ints("345", "x"), TypeError, "x is a str, '345'; wanted a list, array or tensor"),
    "a mapping": (lambda: host_ints({0: 3}, "x"), TypeError, "x is a dict"),
    "a generator": (lambda: host_ints((n for n in (3, 4)), "x"), TypeError, "x is a generator"),
    "None": (lambda: host_ints(None, "x"), TypeError, "x is None; wanted a list"),
    "a low number": (
        lambda: whole_number(0, "n", least=1, advice="Why."),
        ValueError,
        r"^n=0; wanted 1 .* Why\.$",
    ),
    "a high number": (lambda: whole_number(9, "n", most=8), ValueError, "n=9; wanted at most 8"),
    "past int64, one": (lambda: whole_number(2**63, "n"), ValueError, "wanted at most"),
    "half a number": (lambda: whole_number(1.5, "n"), TypeError, "n is a float, 1.5; wanted a whole number"),
    "a flag for a number": (lambda: whole_number(True, "n"), TypeError, "n is a bool"),
    "a text for a number": (lambda: whole_number("8", "n"), TypeError, "n is a str, '8'"),
    "NaN": (lambda: real_number(float("nan"), "x"), ValueError, "x=nan; wanted a finite number"),
    "an integer no tensor holds": (lambda: real_number(2**63, "x"), ValueError, "wanted a finite number"),
    "the bound": (lambda: real_number(0, "x", above=0), ValueError, "x=0; wanted a finite number above 0"),
    "below": (lambda: real_number(-0.1, "x", least=0), ValueError, "wanted a finite number of 0 or more"),
    "no number": (lambda: real_number("1", "x"), TypeError, "x is a str, '1'; wanted a number"),
    "no flag": (lambda: flags(a=True, b=1), TypeError, "b is a int, 1; wanted bool. Pass True or False"),
    "no such word": (lambda: choice("c", "x", "a", "b"), ValueError, "x='c'; wanted one of a, b"),
    "another class": (lambda: instance(1, "x", str, dict), TypeError, "x is a int, 1; wanted str or dict"),
    "no such path": (
        lambda: refuse_missing("./none", "Look."),
        ValueError,
        r"\./none does not exist. Look\.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused(case: str) -> None:
    call, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        call()


def test_names_on_a_hub_and_paths_that_exist_are_taken(tmp_path: Path) -> None:
    refuse_missing("org/model", "")
    refuse_missing(str(tmp_path), "")
