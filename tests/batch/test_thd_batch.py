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

from lightning_thd.alignment import Alignment
from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.batch.noted import NotedBatch, NotedStep
from lightning_thd.batch.upload import uploaded
from lightning_thd.loss.watch import watch

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
    assert max(batch.position_ids.tolist(), default=0) < max(1, *lengths)  # as in a table of positions
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
    rows = data.draw(st.integers(1, 6))
    columns = data.draw(st.integers(1, 9))
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
    assert (kwargs["use_cache"], kwargs["attention_mask"]) == (False, None)
    assert (kwargs["cu_seq_lens_q"].shape, kwargs["max_length_k"]) == ((4,), 2)


def test_batches_survive_pickle_copy_and_replace() -> None:
    batch = THDBatch.collate([{"input_ids": [5, 6, 7]}])
    for clone in (pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch), batch.to("cpu")):
        assert torch.equal(clone.input_ids, batch.input_ids)
        assert clone.stats == batch.stats
    assert batch.replace(loss_scale=3.0).loss_scale == 3.0
    assert batch.loss_scale == 0.5
    assert not hasattr(batch, "__dict__")


def test_a_batch_carries_its_watcher_to_its_copies_and_to_no_other_process() -> None:
    batch = THDBatch.collate([{"input_ids": [1, 2, 3]}])
    assert batch.watcher is None
    watcher: Any = object()
    watch(batch, watcher)
    step = THDStep([batch])
    copies = {
        "replace": batch.replace(set_name="code"),
        "to": batch.to("meta"),
        "a step's to": step.to("meta").microbatches[0],
        "noted": NotedBatch.of(batch),
        "a noted step's to": NotedStep.of(step).to("meta").microbatches[0],
    }
    assert [how for how, copied in copies.items() if copied.watcher is not watcher] == []
    assert pickle.loads(pickle.dumps(batch)).watcher is None


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


@pytest.mark.filterwarnings("error")
def test_read_only_arrays_are_copied_without_a_warning() -> None:
    def fixed(values: Any) -> Any:
        return np.broadcast_to(np.array(values), np.shape(values))  # read-only, as rows of Arrow are

    ids = fixed([[5, 6]])
    mask = fixed([[1, 1]])
    assert THDBatch.from_padded(ids, mask, ids).targets.tolist() == [6, -100]
    batch = THDBatch.collate([{"input_ids": ids[0], "pixel_values": fixed([[1.0]])}])
    assert batch.extras["pixel_values"].tolist() == [[1.0]]
    assert batch.unpack(ids[0])[0].tolist() == [5, 6]


def test_one_row_of_logits_is_no_row_of_slots() -> None:
    batch, single = (THDBatch.collate([{"input_ids": ids}]) for ids in ([5, 6], [5]))
    assert [x.shape for x in batch.unpack(torch.zeros(1, 2, 7))] == [(2, 7)]
    assert [x.shape for x in single.unpack(torch.zeros(1, 1, 7))] == [(1, 7)]
    assert [x.shape for x in single.unpack(torch.zeros(1, 7))] == [(1, 7)]


def test_tables_are_copied_to_mps_before_their_memory_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bool] = []
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, _, non_blocking=False: (sent.append(non_blocking), self)[1]
    )
    uploaded((np.array([0, 3], np.int32), np.array([1.0])), torch.device("mps"))
    assert sent == [False, False]


def test_a_whole_number_among_labels_leaves_them_fp32() -> None:
    labels = THDBatch.collate([{"input_ids": [5], "label": label} for label in (1, 0.5)]).extras["labels"]
    assert (labels.dtype, labels.tolist()) == (torch.float32, [1.0, 0.5])


def test_a_batch_and_a_step_answer_the_same_questions() -> None:
    """What comes from a dataloader gives its packs and what ranks must agree on, whichever it is."""
    batches = [THDBatch.collate([{"input_ids": [n] * n}], loss_scale=0.5) for n in (2, 3)]
    step = THDStep(batches)
    for got, wanted in zip(step.packs, batches, strict=True):
        assert got is wanted
    assert [pack is batches[0] for pack in batches[0].packs] == [True]
    assert (step.agreed, batches[0].agreed) == ((2, 0.5), (1,))
    assert step.in_step() is step
    assert batches[1].in_step().packs[0] is batches[1]

    doubled = step.each(lambda batch: batch.replace(loss_scale=2 * batch.loss_scale))
    assert [batch.loss_scale for batch in doubled.packs] == [1.0, 1.0]
    assert doubled.packs[1].step == (doubled, 1)
    assert batches[0].each(lambda batch: batch.replace(set_name="code")).set_name == "code"


def test_a_step_that_is_moved_to_its_own_device_keeps_its_microbatches() -> None:
    step = THDStep([THDBatch.collate([{"input_ids": [n] * n}]) for n in (2, 3)])
    assert step.to("cpu") is step
    assert step.microbatches[1].step == (step, 1)
