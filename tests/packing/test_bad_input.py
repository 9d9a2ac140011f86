"""Every argument of every public function of packing takes what is right, or refuses in words of its own."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_thd.packing import Cost, Packing, PackPlanner, Packs, Sequences, balance, pack_lengths
from lightning_thd.packing.permutation import permute

ODD: list[Any] = [
    *(
        None,
        0,
        -1,
        1,
        3,
        2**31,
        2**63,
        2**70,
        1.5,
        float("nan"),
        float("inf"),
        True,
        "x",
        "",
        b"a",
        object(),
        int,
    ),
    *([], [1, 2], [1.5, 2], [[1], [2]], [None], ["a"], [2**70], [-1, 2], [1, [2]], (), {}, {"a": 1}, {1, 2}),
    *(np.array(3), np.array([1, 2, 3]), np.array([1.0, 2.0]), np.zeros((2, 2), int), np.array([], int)),
    *(np.array([True, False]), np.array(["a"]), np.array([2**63], np.uint64), np.datetime64("2020")),
    *(torch.tensor([1, 2]), torch.tensor(3.0), torch.zeros(2, 2), torch.ones(2, device="meta")),
    *(Packs(1), Sequences(2)),
]
LENGTHS = [1, 2, 3, 4]
PLANNER = PackPlanner(LENGTHS, 8, global_batch=Packs(2))
Call = tuple[Callable[..., Any], dict[str, Any]]
CALLS: dict[str, Call] = {
    "pack_lengths": (
        pack_lengths,
        {"lengths": LENGTHS, "capacity": 8, "algorithm": "bfd", "max_sequences": None},
    ),
    "balance": (
        balance,
        {"lengths": LENGTHS, "capacity": 8, "dp": 2, "cost": None, "num_microbatches": None},
    ),
    "Cost": (Cost, {"linear": 1.0, "quadratic": 1.0}),
    "Cost()": (Cost(), {"lengths": LENGTHS}),
    "Packing": (Packing, {"indices": np.arange(4), "offsets": np.array([0, 2, 4])}),
    "totals": (pack_lengths(LENGTHS, 8).totals, {"values": LENGTHS}),
    "fill": (pack_lengths(LENGTHS, 8).fill, {"lengths": LENGTHS, "capacity": 8}),
    "PackPlanner": (
        PackPlanner,
        {"lengths": LENGTHS, "capacity": 8, "global_batch": Packs(1), "align": None, "cost": None}
        | {"window": 16, "oversize": "error", "tail": "pad", "seed": 0, "loss_tokens": None}
        | {"scheduler": None, "schedule": None, "counts": None, "num_workers": 0},
    ),
    "step": (PLANNER.step, {"epoch": 0, "k": 0, "dp": 1}),
    "rank": (PLANNER.step(0, 0).microbatches, {"rank": 0}),
    "tail_dropped": (PLANNER.tail_dropped, {"epoch": 0}),
    "state": (PLANNER.state, {"epoch": 0, "step": 0}),
    "resume": (PLANNER.resume, {"state": PLANNER.state(0, 0)}),
    "permute": (permute, {"positions": [0, 1], "total": 5, "key": 3}),
}


@pytest.mark.parametrize("name", CALLS)
def test_odd_arguments_are_taken_or_refused(name: str) -> None:
    call, right = CALLS[name]
    call(**right)
    for argument, odd in itertools.product(right, ODD):
        raised = _raised_in(lambda given=right | {argument: odd}: call(**given))  # type: ignore[misc]
        assert raised is None or "lightning_thd" in raised, (argument, odd)  # not numpy's words, nor torch's


def _raised_in(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except (ValueError, TypeError) as err:
        return traceback.extract_tb(err.__traceback__)[-1].filename
    return None


def test_more_ranks_than_a_job_can_have_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="dp=2147483648: .* at most 1048576"):
        balance([1, 2], 8, dp=2**31)
    with pytest.raises(ValueError, match=r"num_microbatches=16777216: .* at most 8388608"):
        balance([1, 2], 8, dp=2, num_microbatches=2**24)


def test_arrays_and_tensors_are_as_good_as_lists() -> None:
    for lengths in (LENGTHS, tuple(LENGTHS), np.array(LENGTHS, np.uint16), torch.tensor(LENGTHS)):
        assert pack_lengths(lengths, 5).indices.tolist() == pack_lengths(LENGTHS, 5).indices.tolist()
        assert [len(rank) for rank in balance(lengths, 5, dp=2)] == [1, 1]
