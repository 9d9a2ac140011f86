"""THDBatch against slow, obvious Python."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

from lightning_thd.alignment import Alignment
from lightning_thd.batch import THDBatch, THDStep

LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=12)


def make_samples(lengths: list[int], *, labels: bool, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    samples: list[dict[str, Any]] = [{"input_ids": rng.integers(0, 99, n)} for n in lengths]
    for sample in samples if labels else []:
        ids = sample["input_ids"]
        sample["labels"] = np.where(rng.random(len(ids)) < 0.4, -100, ids)
    return samples


def targets_of(sample: dict[str, Any]) -> list[int]:
    labels = [int(x) for x in sample.get("labels", sample["input_ids"])]
    return [*labels[1:], -100]


@given(lengths=LENGTHS, labels=st.booleans())
def test_collate_lays_samples_end_to_end(lengths: list[int], labels: bool) -> None:
    samples = make_samples(lengths, labels=labels)
    batch = THDBatch.collate(samples)
    targets = [t for sample in samples for t in targets_of(sample)]
    assert batch.input_ids.tolist() == [int(x) for sample in samples for x in sample["input_ids"]]
    assert batch.targets.tolist() == targets
    assert batch.position_ids.tolist() == [p for n in lengths for p in range(n)]
    assert batch.cu_seqlens.tolist() == [0, *np.cumsum(lengths).tolist()]
    assert batch.cu_seqlens is batch.cu_seqlens_padded
    assert batch.lengths == batch.padded_lengths == tuple(lengths)
    assert batch.max_seqlen == max(lengths)
    assert (batch.stats.real_tokens, batch.stats.slots) == (sum(lengths), sum(lengths))
    assert batch.loss_tokens == sum(t != -100 for t in targets)
    assert batch.loss_scale == (1 / batch.loss_tokens if batch.loss_tokens else 0.0)


@given(lengths=LENGTHS, labels=st.booleans(), multiple=st.sampled_from([2, 4, 8]), spare=st.integers(0, 3))
def test_collate_pads_sequences_and_total_without_touching_what_is_real(
    lengths: list[int], labels: bool, multiple: int, spare: int
) -> None:
    align = Alignment(sequence_multiple=multiple, total_multiple=multiple * 4)
    samples = make_samples(lengths, labels=labels)
    slots = align.padded_total(sum(-(-n // multiple) * multiple for n in lengths)) + spare * multiple * 4
    batch = THDBatch.collate(samples, align=align, pad_to=slots)
    plain = THDBatch.collate(samples)
    assert len(batch.input_ids) == slots == sum(batch.padded_lengths)
    assert all(n % multiple == 0 for n in batch.padded_lengths)
    assert torch.equal(torch.cat(batch.unpack(batch.input_ids)), plain.input_ids)
    assert torch.equal(torch.cat(batch.unpack(batch.targets)), plain.targets)
    assert torch.equal(torch.cat(batch.unpack(batch.position_ids)), plain.position_ids)
    assert int((batch.targets != -100).sum()) == plain.loss_tokens == batch.loss_tokens
    assert batch.lengths == tuple(lengths)
    assert batch.cu_seqlens_padded.tolist() == [0, *np.cumsum(batch.padded_lengths).tolist()]
    trailing = batch.padded_lengths[len(lengths) :]
    assert torch.diff(batch.cu_seqlens).tolist() == [*lengths, *trailing]
    assert (batch.stats.real_tokens, batch.stats.slots) == (sum(lengths), slots)


def test_no_samples_make_one_dummy_slot_that_weighs_nothing() -> None:
    batch = THDBatch.collate([])
    assert batch.input_ids.tolist() == [0]
    assert batch.targets.tolist() == [-100]
    assert batch.cu_seqlens.tolist() == [0, 1]
    assert (batch.lengths, batch.loss_scale, batch.loss_tokens) == ((), 0.0, 0)
    assert extract_batch_size(batch) == 0


@given(data=st.data())
def test_from_padded_goes_by_the_mask_and_unpack_brings_every_row_back(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 9))
    cells = st.lists(st.integers(0, 1), min_size=columns, max_size=columns)
    mask = torch.tensor(data.draw(st.lists(cells, min_size=rows, max_size=rows)))
    mask[data.draw(st.integers(0, rows - 1)), 0] = 1
    ids = torch.randint(0, 5, (rows, columns))  # pad ids, whatever they are, occur among the real ones
    labels = torch.where(torch.rand(rows, columns) < 0.3, -100, ids) if data.draw(st.booleans()) else None
    batch = THDBatch.from_padded(ids, mask, labels)
    real = [row[keep.bool()] for row, keep in zip(ids, mask, strict=True)]
    assert [x.tolist() for x in batch.unpack(batch.input_ids)] == [x.tolist() for x in real]
    source = ids if labels is None else labels
    expected = [
        [*row[keep.bool()][1:].tolist(), -100][: int(keep.sum())]
        for row, keep in zip(source, mask, strict=True)
    ]
    assert [x.tolist() for x in batch.unpack(batch.targets)] == expected
    assert batch.position_ids.tolist() == [p for row in real for p in range(len(row))]
    assert batch.sequence_ids == tuple(range(rows))


def test_hf_kwargs_are_one_row_with_boundaries_and_no_cache() -> None:
    batch = THDBatch.collate([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}])
    kwargs = batch.hf_kwargs()
    assert kwargs["input_ids"].shape == kwargs["position_ids"].shape == (1, 4)
    assert kwargs["use_cache"] is False
    assert kwargs["attention_mask"] is None
    assert kwargs["cu_seq_lens_q"].tolist() == kwargs["cu_seq_lens_k"].tolist() == [0, 3, 4]
    assert (kwargs["max_length_q"], kwargs["max_length_k"]) == (3, 3)


def test_extras_are_concatenated_moved_and_passed_on() -> None:
    samples = [
        {
            "input_ids": [1, 2],
            "position_ids": np.array([[0, 1], [0, 0], [0, 1]]),
            "pixel_values": torch.ones(4, 6),
            "image_grid_thw": torch.tensor([[1, 2, 2]]),
            "token_type_ids": [0, 1],
        },
        {"input_ids": [3], "position_ids": np.zeros((3, 1), int), "token_type_ids": [1]},
    ]
    batch = THDBatch.collate(samples, pad_to=5).to("meta")
    kwargs = batch.hf_kwargs()
    assert kwargs["pixel_values"].shape == (4, 6)
    assert kwargs["pixel_values"].device.type == "meta"
    assert kwargs["position_ids"].shape == (3, 1, 5)
    assert kwargs["token_type_ids"].shape == (1, 5)
    assert batch.stats.vision_patches == 4


def test_batches_are_immutable_and_survive_pickle_copy_and_replace() -> None:
    batch = THDBatch.collate([{"input_ids": [5, 6, 7]}])
    with pytest.raises(AttributeError, match="immutable"):
        batch.loss_scale = 2.0
    with pytest.raises(AttributeError, match="immutable"):
        del batch.targets
    for clone in (pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch), batch.to("cpu")):
        assert torch.equal(clone.input_ids, batch.input_ids)
        assert clone.stats == batch.stats
    assert batch.replace(loss_scale=3.0).loss_scale == 3.0
    assert batch.loss_scale == 0.5
    assert not hasattr(batch, "__dict__")


def test_lightning_weighs_logs_by_the_loss_tokens() -> None:
    batch = THDBatch.collate([{"input_ids": range(9)}, {"input_ids": [1, 2]}])
    assert extract_batch_size(batch) == batch.loss_tokens == 9
    # A rank's share of a step of 100 loss tokens in 2 microbatches on 5 ranks is 10 a microbatch.
    scaled = batch.replace(loss_scale=5 * 2 / 100)
    assert extract_batch_size(scaled) == 10
    assert extract_batch_size(THDStep([scaled, scaled])) == 20
    # 25 in two microbatches are no whole number each, nor are weights.
    assert extract_batch_size(batch.replace(loss_scale=2 / 25)) == 12.5
    assert extract_batch_size(THDStep([batch.replace(loss_scale=4 / 25)] * 3)) == 18.75
    assert extract_batch_size(batch.replace(loss_scale=8.0)) == 0.125
    assert [extract_batch_size(batch.replace(loss_scale=1 / n)) for n in range(1, 3000)] == [*range(1, 3000)]
    assert next(iter(batch)).shape == (9,)


def test_what_a_step_yields_says_where_its_batches_are() -> None:
    step = THDStep([THDBatch.collate([{"input_ids": [1, 2]}])])
    for found in step:
        with pytest.raises(
            AttributeError, match=r"'hf_kwargs' was asked.*step's batches are step\.microbatches"
        ):
            found.hf_kwargs()  # type: ignore[attr-defined]


def test_step_adds_its_microbatches() -> None:
    batch = THDBatch.collate([{"input_ids": [5, 6, 7]}])
    step = THDStep([batch, batch]).to("cpu")
    assert len(step) == 2
    assert step.stats.real_tokens == 6
    assert "2 microbatches" in repr(step)
    assert "1 sequences, 3 real tokens" in repr(batch)
    with pytest.raises(ValueError, match="at least one microbatch"):
        THDStep([])


@pytest.mark.parametrize(
    ("samples", "kwargs", "message"),
    [
        ([{"ids": [1]}], {}, r"Sample 0 has the keys \['ids'\] but no 'input_ids'"),
        ([{"input_ids": [1]}, {"input_ids": []}], {}, "Sample 1 has no tokens.*empty='drop'"),
        ([{"input_ids": [1, 2], "labels": [1]}], {}, "Sample 0 has 2 input_ids but 1 labels"),
        ([{"input_ids": [1, -100]}], {}, "Sample 0 has the token id -100.*labels"),
        ([{"input_ids": [1.5]}], {}, "input_ids holds float64 values; .*Give one row of integers"),
        ([{"input_ids": [[1, 2]]}], {}, r"shape \(1, 2\)"),
        ([{"input_ids": [1, 2, 3]}], {"pad_to": 2}, "need 3 slots but pad_to=2"),
        ([{"input_ids": [1, 2], "position_ids": [0]}], {}, "position_ids of shape"),
        ([{"input_ids": [1], "input_features": [1]}], {}, "audio inputs cannot be packed"),
        ([{"input_ids": [1], "note": "x"}], {}, "'note' as str"),
        (
            [{"input_ids": [1]}],
            {"align": Alignment(sequence_multiple=2, total_multiple=4), "pad_to": 6},
            "pad_to=6 is no multiple of 4",
        ),
    ],
)
def test_bad_samples_are_refused(samples: list[Any], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        THDBatch.collate(samples, **kwargs)


def test_bad_padded_batches_are_refused() -> None:
    ids = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"shapes \[\[2, 3\], \[3\]"):
        THDBatch.from_padded(ids, torch.ones(3))
    with pytest.raises(ValueError, match="without a real token"):
        THDBatch.from_padded(ids, torch.zeros(2, 3))


def test_unpack_wants_one_row_a_slot() -> None:
    batch = THDBatch.collate([{"input_ids": [5, 6]}])
    logits: Tensor = torch.zeros(1, 2, 7)
    assert [x.shape for x in batch.unpack(logits)] == [(2, 7)]
    with pytest.raises(ValueError, match=r"shape \(3,\), but the batch has 2 slots"):
        batch.unpack(torch.zeros(3))
    single = THDBatch.collate([{"input_ids": [5]}])
    assert [x.shape for x in single.unpack(torch.zeros(1, 1, 7))] == [(1, 7)]
    assert [x.shape for x in single.unpack(torch.zeros(1, 7))] == [(1, 7)]


@pytest.mark.parametrize(
    ("samples", "kwargs", "error", "message"),
    [
        ([{"input_ids": [1, 2], "token_type_ids": [1]}], {}, ValueError, "2 input_ids but 1 token_type_ids"),
        ([{"input_ids": [1], "position_ids": [0.5]}], {}, ValueError, "position_ids holds float64"),
        ([{"input_ids": [1]}], {"sequence_ids": [1, 2]}, ValueError, "1 samples but 2 sequence_ids"),
        (
            [{"input_ids": [5, 3, 8, 1, 9], "labels": [3, 8, 1, 9, 2]}] * 3,
            {},
            ValueError,
            "The samples: the labels are the next tokens, as if they were shifted already",
        ),
        ([{"input_ids": [1, 2], "attention_mask": [1, 0]}], {}, ValueError, "not all ones.*from_padded"),
        ([{"input_ids": [1, 2], "labels": [1, -1]}], {}, ValueError, "Sample 0 has the label -1"),
        ([{"input_ids": [1], "next_label": 2.0}], {}, TypeError, "next_label is a float"),
        ([{"input_ids": [1], "next_label": -3}], {}, ValueError, "next_label=-3"),
        ([{"input_ids": [1], "use_cache": True}], {}, ValueError, "use_cache, which the batch makes"),
        ([[1, 2]], {}, TypeError, "Sample 0 is a list.*wanted a dict"),
        ({"input_ids": [1]}, {}, TypeError, "samples is a dict.*wanted a list of dicts"),
        ([{"input_ids": [1]}], {"pad_to": 2**31}, ValueError, "past int32"),
        ([{"input_ids": [1]}], {"loss_scale": -1.0}, ValueError, "loss_scale=-1.0; wanted a finite number"),
        (
            [{"input_ids": [1], "x": torch.ones(1, 2)}, {"input_ids": [1], "x": torch.ones(1, 3)}],
            {},
            ValueError,
            "concatenated along the first axis",
        ),
    ],
)
def test_samples_that_would_train_on_something_else(
    samples: Any, kwargs: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        THDBatch.collate(samples, **kwargs)


def test_from_padded_refuses_masks_that_mean_something_else() -> None:
    with pytest.raises(ValueError, match="values other than 0 and 1"):
        THDBatch.from_padded([[1, 2, 3]], [[1, 1, 2]])
    with pytest.raises(ValueError, match="ids below 0"):
        THDBatch.from_padded([[1, -2, 3]], [[1, 1, 1]])
    with pytest.raises(ValueError, match="labels below 0"):
        THDBatch.from_padded([[1, 2, 3]], [[1, 1, 1]], [[1, -5, 2]])
    assert THDBatch.from_padded(np.array([[0, 5, 6]]), [[0, 1, 1]]).input_ids.tolist() == [5, 6]


@pytest.mark.filterwarnings("error")
def test_read_only_arrays_are_copied_without_a_warning() -> None:
    def fixed(values: Any) -> Any:
        return np.broadcast_to(np.array(values), np.shape(values))  # read-only, as rows of Arrow are

    ids, mask = fixed([[5, 6]]), fixed([[1, 1]])
    assert THDBatch.from_padded(ids, mask, ids).targets.tolist() == [6, -100]
    batch = THDBatch.collate([{"input_ids": ids[0], "pixel_values": fixed([[1.0]])}])
    assert batch.extras["pixel_values"].tolist() == [[1.0]]
    assert batch.unpack(ids[0])[0].tolist() == [5, 6]
