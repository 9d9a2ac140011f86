"""The family of argument checks: what is taken, and the key words of what is refused."""

from __future__ import annotations

from collections.abc import Callable
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


@pytest.mark.parametrize(
    "given", [[3, 4], (3, 4), np.array([3, 4], np.uint16), torch.tensor([3, 4], dtype=torch.int32)]
)
def test_any_container_of_ints_is_taken(given: object) -> None:
    values = host_ints(given, "lengths", least=3)
    assert values.dtype == np.int64
    assert values.tolist() == [3, 4]
    assert int_tensor(given, "lengths").tolist() == [3, 4]


def test_numbers_become_plain_ones() -> None:
    assert type(whole_number(np.int32(7), "n")) is int
    assert type(real_number(np.float32(0.5), "x", above=0, least=0.5)) is float
    assert type(real_number(2, "x")) is float
    assert host_ints([], "lengths", least=1).dtype == np.int64
    refuse_missing("org/model", "")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: host_ints([[1, 2]], "x"), r"x has shape \(1, 2\); wanted one row"),
        (lambda: host_ints([[1, 2], [3]], "x"), "x is not an array of integers"),
        (lambda: host_ints([1, 2.5], "x"), "x holds float64 values.*Pass integers"),
        (lambda: host_ints([True, False], "x"), "x holds bool values"),
        (lambda: host_ints(torch.tensor([1.0]), "x"), "x holds torch.float32"),
        (lambda: host_ints(torch.ones(2, dtype=torch.int32, device="meta"), "x"), "meta device, which holds"),
        (lambda: host_ints([4, 0, 3], "x", least=1), r"x\[1\] is 0; wanted 1 or more"),
        (lambda: host_ints([1, 2**63], "x"), "x holds (float64|9223372036854775808)"),
        (lambda: host_ints([2**70], "x"), f"x is a list, .{2**70}.; wanted a list, array or tensor of ints"),
        (lambda: host_ints("345", "x"), "x is a str, '345'; wanted a list, array or tensor"),
        (lambda: host_ints({0: 3}, "x"), "x is a dict"),
        (lambda: host_ints((n for n in (3, 4)), "x"), "x is a generator"),
        (lambda: host_ints(None, "x"), "x is None; wanted a list"),
        (lambda: int_tensor(torch.tensor([True]), "x"), r"x is torch.bool.*\.to\(torch.int32\)"),
        (lambda: whole_number(0, "n", least=1, advice="Why."), r"^n=0; wanted 1 .* Why\.$"),
        (lambda: whole_number(9, "n", most=8), "n=9; wanted at most 8"),
        (lambda: whole_number(2**63, "n"), "wanted at most"),
        (lambda: whole_number(1.5, "n"), "n is a float, 1.5; wanted a whole number"),
        (lambda: whole_number(True, "n"), "n is a bool"),
        (lambda: real_number(float("nan"), "x"), "x=nan; wanted a finite number"),
        (lambda: real_number(2**63, "x"), "wanted a finite number"),
        (lambda: real_number(0, "x", above=0), "x=0; wanted a finite number above 0"),
        (lambda: real_number(-0.1, "x", least=0), "wanted a finite number of 0 or more"),
        (lambda: real_number("1", "x"), "x is a str, '1'; wanted a number"),
        (lambda: flags(a=True, b=1), "b is a int, 1; wanted bool. Pass True or False"),
        (lambda: choice("c", "x", "a", "b"), "x='c'; wanted one of a, b"),
        (lambda: instance(1, "x", str, dict), "x is a int, 1; wanted str or dict"),
        (lambda: refuse_missing("./none", "Look."), r"\./none does not exist. Look\."),
    ],
)
def test_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()
