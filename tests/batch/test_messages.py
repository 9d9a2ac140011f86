"""Messages about batches and their fields that no other test of the room meets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lightning_thd.batch import THDBatch, THDStep

SAMPLES = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]


def batch() -> THDBatch:
    return THDBatch.collate(SAMPLES)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "boundaries of several sequences": (
        lambda: THDBatch.collate([SAMPLES[0], {**SAMPLES[1], "cu_seqlens": np.array([0, 1, 2])}]),
        "Sample 1 carries cu_seqlens, as a row of several sequences does, and a sample is one: they would",
    ),
    "a mask that would be lost": (
        lambda: THDBatch.collate([{"input_ids": np.ma.MaskedArray([5, 6], [0, 1])}]),
        r"Sample 0: input_ids is a masked array, whose mask would be lost. Give its compressed\(\) values",
    ),
    "labels whose mask would be lost": (
        lambda: THDBatch.collate([{"input_ids": [5, 6], "labels": np.ma.MaskedArray([5, 6], [0, 1])}]),
        "Sample 0: labels is a masked array, whose mask would be lost",
    ),
    "positions of two kinds": (
        lambda: THDBatch.collate(
            [{**SAMPLES[0], "position_ids": [[0, 1, 2]] * 3}, {**SAMPLES[1], "position_ids": [0, 1]}]
        ),
        r"Sample 1 has position_ids of shape \(2,\), and a sample before it of another kind. Give every",
    ),
    "unpacking what is no tensor": (
        lambda: batch().unpack([1, 2, 3]),  # type: ignore[arg-type]
        r"unpack\(\) got a list, \[1, 2, 3\]; wanted a tensor with one row a slot",
    ),
    "ids of fewer sequences": (
        lambda: THDBatch(
            **{
                name: getattr(batch(), name)
                for name in (
                    *("input_ids", "targets", "position_ids", "cu_seqlens", "cu_seqlens_padded"),
                    *("lengths", "padded_lengths", "stats", "loss_scale"),
                )
            },
            sequence_ids=[0],
        ),
        "There are 2 lengths but 1 sequence_ids. Give one a sequence",
    ),
    "moving a batch without values": (lambda: batch().to("meta").to("cpu"), "A batch on the meta device has"),
    "a device that is none": (lambda: batch().to("abacus"), r"'abacus' is no device \(.*\). Pass 'cpu'"),
    "a step of other things": (
        lambda: THDStep([batch(), None]),  # type: ignore[list-item]
        "A THDStep is made of a list, .*; wanted a list of THDBatch",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_message(case: str) -> None:
    call, message = CASES[case]
    with pytest.raises((ValueError, TypeError), match=message):
        call()
