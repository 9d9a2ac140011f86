"""Fixed shapes: what fits, what the tail becomes, and what a captured step may see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_thd import THDBatch
from lightning_thd.alignment import Alignment
from lightning_thd.callbacks.cuda_graph import Bucket, CaptureError, make_buckets
from lightning_thd.cuda_graph.buckets import StaticInputs, choose
from lightning_thd.seqlens import check_cu_seqlens
from tests.cuda_graph.support import pad_batch

CPU = torch.device("cpu")


def collate(lengths: list[int], **kwargs: object) -> THDBatch:
    return THDBatch.collate([{"input_ids": torch.arange(n) + 1} for n in lengths], **kwargs)  # type: ignore[arg-type]


def static(bucket: Bucket, axes: int | None = None) -> StaticInputs:
    return StaticInputs(bucket, CPU, axes=axes, scale_dtype=torch.float32)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=0, max_size=9),
    slots=st.integers(20, 70),
    sequences=st.integers(6, 14),
    longest=st.integers(5, 14),
    align=st.sampled_from([1, 4]),
    pad=st.booleans(),
)
def test_a_batch_that_fits_is_covered_and_one_that_does_not_is_told_why(
    lengths: list[int], slots: int, sequences: int, longest: int, align: int, pad: bool
) -> None:
    if sequences * longest < slots:
        return
    bucket = Bucket(slots=slots, sequences=sequences, max_seqlen=longest)
    multiples = Alignment(sequence_multiple=align, total_multiple=align)
    batch = collate(lengths, align=multiples, pad_to=120 if pad else None)
    used = [-(-n // align) * align for n in lengths]
    tail = slots - sum(used)
    chosen, reason = choose([bucket], batch)
    if tail < 0:
        assert reason == "tokens"
    elif max(used, default=0) > bucket.max_seqlen:
        assert reason == "max_seqlen"
    elif len(used) + -(-tail // bucket.max_seqlen) > sequences:
        assert reason == "num_sequences"
    else:
        assert (chosen, reason) == (bucket, None)
        check_filled(batch, bucket, lengths, used)


def check_filled(batch: THDBatch, bucket: Bucket, lengths: list[int], used: list[int]) -> None:
    inputs = static(bucket)
    leftovers = collate([bucket.max_seqlen] * (bucket.slots // bucket.max_seqlen))
    inputs.fill(leftovers)
    inputs.fill(batch)
    padded = pad_batch(batch, bucket)
    total = sum(used)
    for found in (inputs.batch, padded):
        check_cu_seqlens(found.cu_seqlens_padded, bucket.slots)
        sizes = found.cu_seqlens_padded.diff().tolist()
        assert len(sizes) == bucket.sequences
        assert sizes[: len(used)] == used
        assert max(sizes) <= bucket.max_seqlen
        assert found.cu_seqlens.diff().tolist()[: len(used)] == lengths
        assert found.cu_seqlens.diff().tolist()[len(used) :] == sizes[len(used) :]
        for name, rest in (("input_ids", 0), ("targets", -100)):
            assert torch.equal(getattr(found, name)[:total], getattr(batch, name)[:total])
            assert bool((getattr(found, name)[total:] == rest).all())
        starts = torch.repeat_interleave(found.cu_seqlens_padded[:-1], found.cu_seqlens_padded.diff())
        assert torch.equal(found.position_ids[total:], (torch.arange(bucket.slots) - starts)[total:])
        assert torch.equal(found.position_ids[:total], batch.position_ids[:total])
    assert float(inputs.batch.loss_scale) == pytest.approx(batch.loss_scale)


def test_several_axes_of_positions_are_filled() -> None:
    bucket = Bucket(slots=16, sequences=6, max_seqlen=8)
    inputs = static(bucket, axes=3)
    for lengths in ([3, 4], [8, 1, 1]):
        batch = collate(lengths)
        batch = batch.replace(position_ids=batch.position_ids.expand(3, -1) * torch.tensor([[1], [2], [3]]))
        assert inputs.matches(batch)
        inputs.fill(batch)
        assert torch.equal(inputs.batch.position_ids[:, : sum(lengths)], batch.position_ids)
    assert not inputs.matches(collate([3]))


def test_the_cheapest_bucket_is_chosen_and_the_nearest_reason_given() -> None:
    buckets = sorted(
        [*make_buckets((4, 8), slots=32, max_seqlen=16), Bucket(slots=16, sequences=4, max_seqlen=8)]
    )
    assert choose(buckets, collate([3, 4]))[0] == buckets[0]
    assert choose(buckets, collate([9, 4]))[0] == Bucket(slots=32, sequences=4, max_seqlen=16)
    assert choose(buckets, collate([3] * 7))[0] == Bucket(slots=32, sequences=8, max_seqlen=16)
    assert choose(buckets, collate([2] * 9))[1] == "num_sequences"
    assert choose(buckets, collate([17]))[1] == "max_seqlen"
    assert choose(buckets, collate([16, 16, 1]))[1] == "tokens"
    assert choose(buckets, collate([3]).replace(extras={"pixel_values": torch.ones(1)}))[1] == "extras"


@pytest.mark.parametrize("name", ["lengths", "stats", "loss_tokens", "__len__"])
def test_what_the_host_knows_is_refused_with_the_line(name: str) -> None:
    batch = static(Bucket(slots=8, sequences=2, max_seqlen=8)).batch
    with pytest.raises(CaptureError, match=r"test_buckets.py:\d+ in test_what_the_host.*reads batch\."):
        len(batch) if name == "__len__" else getattr(batch, name)
    assert batch.replace(targets=batch.input_ids).targets is batch.input_ids
    assert batch.to("cpu").hf_kwargs()["max_length_q"] == 8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Bucket(slots=8, sequences=True, max_seqlen=1),
            "sequences=True.: wanted an int of at least 1",
        ),
        (lambda: Bucket(slots=100, sequences=4, max_seqlen=20), "cover 80 of 100 .*Give sequences=5 or more"),
        (lambda: make_buckets((), slots=8), "max_sequences is empty"),
    ],
)
def test_shapes_that_cannot_be_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
