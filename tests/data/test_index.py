"""Lengths and loss tokens counted by the index against a loop over the samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_thd.data.store.index import build_index
from lightning_thd.packing import PackPlanner, Packs
from lightning_thd.packing.entries import Oversize
from tests.tiny import sequences


class WithLengths(list[dict[str, Any]]):
    lengths: Any = None
    loss_tokens: Any = None


def counted(samples: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    labels = [sample.get("labels", sample["input_ids"]) for sample in samples]
    return [len(s["input_ids"]) for s in samples], [int((np.asarray(x)[1:] != -100).sum()) for x in labels]


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_are_counted(labels: bool, num_workers: int) -> None:
    samples = sequences(300, labels=labels)
    index = build_index(samples, num_workers=num_workers)
    assert (index.lengths.tolist(), index.loss_tokens.tolist()) == counted(samples)


def test_known_lengths_save_the_reading() -> None:
    samples = WithLengths(sequences(20))
    samples.lengths, loss = counted(samples)
    index = build_index(samples)
    assert index.lengths.tolist() == samples.lengths
    assert index.loss_tokens.tolist() == loss
    masked = WithLengths(sequences(20, labels=True))
    masked.lengths, expected = counted(masked)
    assert build_index(masked).loss_tokens.tolist() == expected
    masked.loss_tokens = expected
    assert build_index(masked).loss_tokens.tolist() == expected


@given(
    limit=st.integers(2, 9),
    oversize=st.sampled_from(["split", "truncate", "drop", "own_pack"]),
    labels=st.booleans(),
    seed=st.integers(0, 50),
)
def test_pieces_are_read_and_counted_with_their_targets(
    limit: int, oversize: Oversize, labels: bool, seed: int
) -> None:
    samples = sequences(12, labels=labels, seed=seed)
    index = build_index(samples)
    assume(oversize != "drop" or index.lengths.min() <= limit)
    planner = PackPlanner(index.lengths, limit, global_batch=Packs(1), oversize=oversize)
    targets: dict[int, dict[int, int]] = {}
    for k in range(len(planner)):
        for spans in planner.step(0, k, 1).microbatches(0):
            total = 0
            columns = (spans.index, spans.start, spans.stop, spans.continued)
            for i, start, stop, continued in zip(*columns, strict=True):
                sample = index.sample(samples, int(i), int(start), int(stop), bool(continued))
                ids = samples[i]["input_ids"][start:stop]
                assert np.array_equal(sample["input_ids"], ids)
                source = sample.get("labels", sample["input_ids"])
                found = [*source[1:], sample.get("next_label", -100)]
                if oversize == "split":  # no target is lost, and none comes twice
                    for at, target in enumerate(found, start=int(start)):
                        assert at not in targets.setdefault(int(i), {})
                        targets[int(i)][at] = int(target)
                total += sum(int(target) != -100 for target in found)
            assert index.loss_weights(samples, spans)[0].sum() == total
    for i, found_targets in targets.items():
        source = samples[i].get("labels", samples[i]["input_ids"])
        assert [found_targets[at] for at in range(len(source))] == [*source[1:].tolist(), -100]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "The dataset is empty"),
        ([{"input_ids": [1]}, {"input_ids": []}], r"Sequence 1 has no tokens \(1 of 2 are.*empty='drop'"),
        ([{"ids": [1]}], r"Sequence 0 has the keys \['ids'\]"),
        ([{"input_ids": [1, 2], "labels": [1]}], "2 input_ids but 1 labels"),
    ],
)
def test_bad_data_sets_are_refused(dataset: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_index(dataset)


def test_lengths_that_do_not_match_are_refused() -> None:
    samples = WithLengths(sequences(3))
    samples.lengths = [1, 2]
    with pytest.raises(ValueError, match="3 sequences but 2 `lengths`"):
        build_index(samples)
    samples.lengths = [999, 1, 1]
    index = build_index(samples)
    with pytest.raises(ValueError, match=r"Sequence 0 has \d+ tokens, but 999 were counted"):
        index.sample(samples, 0, 0, 999)
