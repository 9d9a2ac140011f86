"""Fixed shapes: what fits, what the tail becomes, what a step may see; and which are chosen."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_thd import THDBatch
from lightning_thd.alignment import Alignment
from lightning_thd.callbacks.cuda_graph import Bucket, CaptureError, GraphCosts, make_buckets
from lightning_thd.cli import main
from lightning_thd.cuda_graph import graph_choice
from lightning_thd.cuda_graph.buckets import BatchShape, StaticInputs, choose
from lightning_thd.packing import PackPlanner, Packs, Sequences
from lightning_thd.packing.prefixes import PrefixPlanner
from lightning_thd.seqlens import check_cu_seqlens
from tests.cuda_graph.support import pad_batch, slow_offsets

CPU = torch.device("cpu")


def collate(lengths: list[int], **kwargs: object) -> THDBatch:
    return THDBatch.collate([{"input_ids": torch.arange(n) + 1} for n in lengths], **kwargs)  # type: ignore[arg-type]


def static(bucket: Bucket, axes: int | None = None, longest: int = 4) -> StaticInputs:
    return StaticInputs(bucket, CPU, axes=axes, scale_dtype=torch.float32, longest=longest)


def fill(inputs: StaticInputs, batch: THDBatch) -> None:
    inputs.fill(batch)
    inputs.unpack()


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
    inputs = static(bucket, longest=7)
    leftovers = collate([bucket.max_seqlen] * (bucket.slots // bucket.max_seqlen))
    fill(inputs, leftovers)
    fill(inputs, batch)
    padded = pad_batch(batch, bucket)
    total = sum(used)

    for filled in (inputs.batch, padded):
        check_cu_seqlens(filled.cu_seqlens_padded, bucket.slots)
        sizes = filled.cu_seqlens_padded.diff().tolist()
        assert len(sizes) == bucket.sequences
        assert sizes[: len(used)] == used
        assert max(sizes) <= bucket.max_seqlen
        assert filled.cu_seqlens.diff().tolist()[: len(used)] == lengths
        assert filled.cu_seqlens.diff().tolist()[len(used) :] == sizes[len(used) :]
        for name, rest in (("input_ids", 0), ("targets", -100)):
            assert torch.equal(getattr(filled, name)[:total], getattr(batch, name)[:total])
            assert bool((getattr(filled, name)[total:] == rest).all())
        starts = torch.repeat_interleave(filled.cu_seqlens_padded[:-1], filled.cu_seqlens_padded.diff())
        positions = (torch.arange(bucket.slots) - starts)[total:]
        if filled is inputs.batch:  # a table of positions may hold no more
            positions = positions % 7
        assert torch.equal(filled.position_ids[total:], positions)
        assert torch.equal(filled.position_ids[:total], batch.position_ids[:total])

    assert float(inputs.batch.loss_scale) == pytest.approx(batch.loss_scale)


@given(
    lengths=st.lists(st.integers(1, 16), min_size=1, max_size=9),
    sequences=st.integers(3, 14),
    multiple=st.sampled_from([1, 8]),
)
def test_offsets_are_those_of_pad_cu_seqlens(lengths: list[int], sequences: int, multiple: int) -> None:
    align = Alignment(sequence_multiple=multiple, total_multiple=16)
    samples = [{"input_ids": list(range(length))} for length in lengths]
    batch = THDBatch.collate(samples, align=align if multiple > 1 else None)
    bucket = Bucket(slots=96, sequences=sequences, max_seqlen=48)
    assume(choose([bucket], batch)[0] is bucket)
    padded, real = slow_offsets(batch, bucket)
    inputs = static(bucket)
    fill(inputs, batch)
    assert inputs.batch.cu_seqlens_padded.tolist() == padded.tolist()
    assert inputs.batch.cu_seqlens.tolist() == real.tolist()


def test_several_axes_of_positions_are_filled() -> None:
    bucket = Bucket(slots=16, sequences=6, max_seqlen=8)
    inputs = static(bucket, axes=3)
    assert inputs.dummy(BatchShape(16, 2, 8)).position_ids.tolist() == [[0, 1, 2, 3] * 4] * 3
    for lengths in ([3, 4], [8, 1, 1]):
        batch = collate(lengths)
        batch = batch.replace(position_ids=batch.position_ids.expand(3, -1) * torch.tensor([[1], [2], [3]]))
        assert inputs.matches(batch)
        fill(inputs, batch)
        assert torch.equal(inputs.batch.position_ids[:, : sum(lengths)], batch.position_ids)
    assert not inputs.matches(collate([3]))


def test_the_cheapest_bucket_is_chosen_and_the_nearest_reason_given() -> None:
    buckets = [Bucket(slots=16, sequences=4, max_seqlen=8), *make_buckets((4, 8), slots=32, max_seqlen=16)]
    assert choose(buckets, collate([3, 4]))[0] == buckets[0]
    assert choose(buckets, collate([9, 4]))[0] == Bucket(slots=32, sequences=4, max_seqlen=16)
    assert choose(buckets, collate([3] * 7))[0] == Bucket(slots=32, sequences=8, max_seqlen=16)
    assert choose(buckets, collate([2] * 9))[1] == "num_sequences"
    assert choose(buckets, collate([17]))[1] == "max_seqlen"
    assert choose(buckets, collate([16, 16, 1]))[1] == "tokens"
    assert BatchShape.of_batch(collate([3, 3, 5], share_prefixes=True)) == BatchShape(5, 1, 5)
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


@settings(max_examples=60, deadline=None)
@given(
    needs=st.lists(st.integers(1, 30), min_size=1, max_size=25),
    count=st.integers(1, 3),
    graph=st.floats(0.1, 1.2),
    per_sequence=st.floats(0.0, 0.1),
)
def test_the_choice_is_the_best(needs: list[int], count: int, graph: float, per_sequence: float) -> None:
    costs = GraphCosts(graph=graph, per_sequence=per_sequence)
    sample = np.array(needs)

    def by_hand(sequences: tuple[int, ...]) -> float:
        total = 0.0
        for n in needs:
            fitting = [s for s in sequences if s >= n]
            total += graph + per_sequence * min(fitting) if fitting else 1.0
        return total / len(needs)

    best = min(by_hand(c) for k in range(count + 1) for c in combinations(sorted(set(needs)), k))
    chosen = graph_choice.best_sequences(sample, count, costs)
    assert graph_choice.expected_cost(sample, chosen, costs) == pytest.approx(by_hand(chosen))
    # A further bucket has to save half a per cent of an eager step.
    assert by_hand(chosen) <= best + 0.005 * count + 1e-12


def test_needs_count_dummies_and_batches_that_fit_no_bucket_count_as_eager() -> None:
    shapes = [BatchShape(90, 5, 30), BatchShape(100, 5, 30), BatchShape(10, 1, 10), BatchShape(101, 1, 30)]
    assert graph_choice.needed_sequences(shapes, 100, 30).tolist() == [6, 5, 4]
    (*_, choice) = graph_choice.plan_graphs(shapes, slots=100, max_seqlen=30, given=[8]).choices
    assert choice.coverage == 0.75
    assert choice.speedup == pytest.approx(1 / (0.75 * GraphCosts().replay(8) + 0.25))


def test_packs_that_fit_only_by_their_shared_prefixes_are_not_captured() -> None:
    rows = [np.array([1] * 50 + [i], "<i4").tobytes() for i in range(20)]
    planner = PrefixPlanner(np.full(20, 51), 64, ids=rows.__getitem__, global_batch=Packs(1))
    assert "shared prefixes" in str(graph_choice.plan_for(planner).problem())
    rows[:10] = [np.full(51, i + 9, "<i4").tobytes() for i in range(10)]  # these share nothing
    rows[10:] = [np.array([1] * 9 + [i], "<i4").tobytes() for i in range(5)]  # one pack, which would fit
    planner = PrefixPlanner([51] * 10 + [10] * 5, 64, ids=rows.__getitem__, global_batch=Packs(1))
    (*_, choice) = graph_choice.plan_for(planner, given=[99]).choices
    assert choice.coverage == pytest.approx(10 / 11)
    bos = [np.array([1, *[i] * 20], "<i4").tobytes() for i in range(20)]  # collate shares the first token
    planner = PrefixPlanner([21] * 20, 64, ids=bos.__getitem__, global_batch=Packs(1))
    assert "shared prefixes" in str(graph_choice.plan_for(planner).problem())


@pytest.mark.parametrize("batch", [Packs(4), Sequences(40)])
def test_layouts_are_those_the_planner_will_make(batch: Packs | Sequences) -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 900)
    planner = PackPlanner(lengths, 256, global_batch=batch)
    sampled = graph_choice.sample_shapes(planner, dp=2)
    all_of_them = {
        BatchShape.of(spans.lengths.tolist())
        for k in range(len(planner))
        for rank in planner.step(0, k, 2).spans_by_rank()
        for spans in rank
    }
    assert len(sampled) > 30
    assert set(sampled) == all_of_them
    assert graph_choice.plan_for(planner, dp=2).max_seqlen == lengths.max()


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(f'{{"text": "{"ab" * (1 + i % 20)}"}}\n' for i in range(200)))
    main(["graph-plan", str(path), "--capacity", "128", "--max-sequences", "64", "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["chosen"]["sequences"] == [64]
    assert plan["slots"] == 128
    assert plan["max_seqlen"] <= 41
    assert plan["chosen"]["coverage"] > 0.9
    with pytest.raises(SystemExit):
        main(["graph-plan", str(path), "--text-key", "body"])
    assert "no string under the key 'body', found ['text']" in capsys.readouterr().err


def test_costs_and_samples_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"GraphCosts\(eager=0.0\): wanted a finite time >= 0"):
        GraphCosts(eager=0.0)
    assert "no sampled batch fits" in str(graph_choice.plan_graphs([], slots=8, max_seqlen=8).problem())
