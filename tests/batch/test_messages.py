"""What batches refuse: one row for each kind of refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_thd.alignment import Alignment
from lightning_thd.batch import THDBatch, THDStep

BATCH = THDBatch.collate([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
SHIFTED = {"input_ids": [5, 3, 8, 1, 9], "labels": [3, 8, 1, 9, 2]}
MASKED = np.ma.MaskedArray([5, 6], [0, 1])
BY_FOUR = Alignment(sequence_multiple=2, total_multiple=4)


def two(**further: Any) -> THDBatch:
    return THDBatch.collate([{"input_ids": [1, 2], **further}])


def one(**how: Any) -> THDBatch:
    return THDBatch.collate([{"input_ids": [1]}], **how)


def padded(*rows: Any) -> THDBatch:
    return THDBatch.from_padded(*([row] for row in rows))


CASES: list[tuple[Callable[[], Any], str]] = [
    # Samples
    (lambda: THDBatch.collate({"input_ids": [1]}), "samples is a dict.*wanted a list of dicts"),
    (lambda: THDBatch.collate([[1, 2]]), "Sample 0 is a list.*wanted a dict"),
    (lambda: THDBatch.collate([{"ids": [1]}]), r"Sample 0 has the keys \['ids'\] but no 'input_ids'"),
    (lambda: THDBatch.collate([SHIFTED] * 3), "The samples: the labels are the next tokens"),
    (lambda: two(input_ids=[]), "Sample 0 has no tokens.*empty='drop'"),
    (lambda: two(input_ids=[1, -100]), "Sample 0 has the token id -100.*labels"),
    (lambda: two(input_ids=[1.5, 1]), "input_ids holds float64 values; .*Give one row of integers"),
    (lambda: two(input_ids=[[1, 2]]), r"shape \(1, 2\)"),
    (lambda: two(input_ids=MASKED), r"input_ids is a masked array, whose mask would be lost"),
    (lambda: two(labels=MASKED), "labels is a masked array, whose mask would be lost"),
    (lambda: two(labels=[1]), "Sample 0 has 2 input_ids but 1 labels"),
    (lambda: two(labels=[1, -1]), "Sample 0 has the label -1"),
    (lambda: two(token_type_ids=[1]), "2 input_ids but 1 token_type_ids"),
    (lambda: two(position_ids=[0]), "position_ids of shape"),
    (lambda: two(position_ids=[0.5, 1]), "position_ids holds float64"),
    (lambda: two(attention_mask=[1, 0]), "not all ones.*from_padded"),
    (lambda: two(next_label=2.0), "next_label is a float"),
    (lambda: two(next_label=-3), "next_label=-3"),
    (lambda: two(use_cache=True), "use_cache, which the batch makes"),
    (lambda: two(input_features=[1]), "audio inputs cannot be packed"),
    (lambda: two(cu_seqlens=np.array([0, 1, 2])), "cu_seqlens, which marks several sequences in a row"),
    (lambda: two(note="x"), "'note' as str"),
    (
        lambda: THDBatch.collate([{"input_ids": [1], "x": torch.ones(1, n)} for n in (2, 3)]),
        "concatenated along the first axis",
    ),
    (
        lambda: THDBatch.collate([{"input_ids": [1], "position_ids": x} for x in ([[0]] * 3, [0])]),
        r"Sample 1 has position_ids of shape \(1,\), unlike an earlier sample",
    ),
    # Batches
    (lambda: THDBatch.collate([{"input_ids": [1, 2, 3]}], pad_to=2), "need 3 slots but pad_to=2"),
    (lambda: one(align=BY_FOUR, pad_to=6), "6 slots; wanted a multiple of 4"),
    (lambda: one(pad_to=2**31), "past int32"),
    (lambda: one(sequence_ids=[1, 2]), "1 samples but 2 sequence_ids"),
    (lambda: one().replace(sequence_ids=[1, 2]), "1 lengths have 2 sequence_ids"),
    (lambda: one(loss_scale=-1.0), "loss_scale=-1.0; wanted a finite number"),
    (lambda: THDBatch.from_padded([[1, 2]], [1, 1]), r"shapes \[\[1, 2\], \[2\]"),
    (lambda: THDBatch.from_padded([[1, 2]], None), "attention_mask is None; wanted .*Pass ones if"),
    (lambda: padded([1, 2, 3], [0, 0, 0]), "without a real token"),
    (lambda: padded([1, 2, 3], [1, 1, 2]), "values other than 0 and 1"),
    (lambda: padded([1, -2, 3], [1, 1, 1]), "ids outside 0"),
    (lambda: padded([*range(9)], [1] * 9, [*range(1, 10)]), "the labels are the next tokens"),
    (lambda: padded([1, 2, 3], [1, 1, 1], [1, 2**31, 2]), "labels outside it"),
    (lambda: padded([1, 2, 3], [1, 1, 1], [1, -5, 2]), "or labels outside it that are not -100"),
    (lambda: BATCH.unpack(torch.zeros(3)), r"shape \(3,\), but the batch has 5 slots"),
    (lambda: BATCH.to("meta").to("cpu"), "A batch on the meta device has no values to move to"),
    (lambda: BATCH.to("abacus"), r"'abacus' is not a device"),
    (lambda: THDStep([]), "at least one microbatch"),
    (lambda: THDStep([BATCH, None]), "A THDStep is made of a list, .*; wanted a list of THDBatch"),
    (lambda: setattr(BATCH, "loss_scale", 2.0), "immutable"),
    (lambda: delattr(BATCH, "lengths"), "immutable"),
]


@pytest.mark.parametrize(("call", "words"), CASES)
def test_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError), match=words):
        call()


def as_a_dict() -> object:
    return dict(**BATCH)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (as_a_dict, r"no dict, as in model\(\*\*batch\). Write model\(\*\*batch.hf_kwargs\(\)\)"),
        (lambda: BATCH["input_ids"], r"no dict, as in batch\['input_ids'\]. Write batch.input_ids"),
        (lambda: BATCH["labels"], "batch.targets holds the next token of each slot, already shifted"),
        (lambda: BATCH[0], r"as in batch\[0\].*batch.unpack"),
    ],
)
def test_a_batch_that_is_taken_for_a_dict_says_what_to_write(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_names_of_other_batches_are_answered_and_stay_absent() -> None:
    with pytest.raises(AttributeError, match="A THDBatch has no labels. batch.targets holds the next token"):
        _ = BATCH.labels
    with pytest.raises(AttributeError, match="no attention_mask. A pack has no mask"):
        _ = BATCH.attention_mask
    with pytest.raises(AttributeError, match=r"no shape. It is no tensor. Write model\(\*\*batch.hf_kwargs"):
        _ = BATCH.shape
    with pytest.raises(AttributeError, match="'THDBatch' object has no attribute 'other'"):
        _ = BATCH.other
    assert not hasattr(BATCH, "labels")
