"""Queries with positives and negatives: read from anything, kept together in packs, refused if not whole."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_thd import Packs, Sequences, THDBatch, THDDataModule
from lightning_thd.alignment import Alignment
from lightning_thd.batch.examples import places_of
from lightning_thd.data import ByteTokenizer
from tests.data.support import Rows, batches_of

QUERY = 0
POSITIVE = 1
NEGATIVE = 2
RECORDS: list[dict[str, Any]] = [
    {"query": f"q{i}", "positive": f"the answer {i}" * (1 + i % 3), "negative": f"not {i}"} for i in range(9)
]
Example = list[tuple[int, list[int]]]


def ids(text: str) -> list[int]:
    encoded: list[int] = ByteTokenizer()(text).tolist()
    return encoded


def wanted(records: list[dict[str, Any]]) -> list[Example]:
    roles = {"query": QUERY, "positive": POSITIVE, "negative": NEGATIVE}
    return sorted([(roles[key], ids(text)) for key, text in record.items()] for record in records)


def examples_of(batch: THDBatch) -> list[Example]:
    """Cut a batch before each query."""
    examples: list[Example] = []
    assert batch.roles is not None
    for role, row in zip(batch.roles, batch.unpack(batch.input_ids), strict=True):
        if role == QUERY:
            examples.append([])
        examples[-1].append((role, row.tolist()))
    return examples


def read(train: Any, **how: Any) -> list[Example]:
    batches = batches_of(THDDataModule(train, capacity=128, **how))
    assert len(batches) > 2  # or nothing was packed
    return sorted(example for batch in batches for example in examples_of(batch))


def as_ids(record: dict[str, Any]) -> dict[str, Any]:
    return {key: ids(text) for key, text in record.items()}


@pytest.mark.parametrize(
    "kind", ["list", "anchor", "ids", "datasets", "ids in datasets", "stream", "ids in a stream"]
)
def test_pairs_are_read_from_rows_of_any_kind(kind: str) -> None:
    with_anchor = [{"anchor": x["query"], **{k: x[k] for k in ("positive", "negative")}} for x in RECORDS]
    sources: dict[str, Any] = {
        "list": RECORDS,
        "anchor": with_anchor,
        "ids": [as_ids(record) for record in RECORDS],
        "datasets": datasets.Dataset.from_list(RECORDS),
        "ids in datasets": datasets.Dataset.from_list([as_ids(record) for record in RECORDS]),
        "stream": Rows(*RECORDS),
        "ids in a stream": Rows(*map(as_ids, RECORDS)),
    }
    assert read(sources[kind]) == wanted(RECORDS)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_pairs_are_read_from_files(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"pairs.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    elif suffix == "json":
        path.write_text(json.dumps(RECORDS))
    elif suffix == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["query", "positive", "negative"])
            writer.writeheader()
            writer.writerows(RECORDS)
    else:
        datasets.Dataset.from_list(RECORDS).to_parquet(path)

    assert read(str(path), cache_dir=tmp_path / "cache") == wanted(RECORDS)
    assert read(str(path), cache_dir=tmp_path / "cache") == wanted(RECORDS)  # from the cache
    if suffix == "jsonl":
        assert read([str(path)], cache_dir=tmp_path / "cache", num_workers=2) == wanted(RECORDS)


def test_several_positives_and_negatives_follow_their_query() -> None:
    record = {"negative_1": [7], "negative_2": [8, 9], "positives": [[3], [4, 5]], "query": [1, 2], "id": "x"}
    for negatives in ({}, {"negative": [[7], [8, 9]]}):
        example = record if not negatives else {"query": [1, 2], "positive": [[3], [4, 5]], **negatives}
        batch = THDBatch.collate([example, {"anchor": [6], "positive": [6, 6]}], sequence_ids=[4, 2])
        assert batch.roles == (0, 1, 1, 2, 2, 0, 1)
        assert batch.lengths == (2, 1, 2, 1, 2, 1, 2)
        assert batch.sequence_ids == (4, 4, 4, 4, 4, 2, 2)
        assert batch.input_ids.tolist() == [1, 2, 3, 4, 5, 7, 8, 9, 6, 6, 6]
        places = places_of(batch.roles)
        assert places.queries.tolist() == [0, 5]
        assert places.documents.tolist() == [1, 2, 3, 4, 6]
        assert places.pairs.tolist() == [[0, 0], [0, 1], [1, 4]]


def test_parts_are_sequences_for_targets_counts_and_scales() -> None:
    plain = [{"input_ids": ids(text)} for record in RECORDS for text in record.values()]
    one = THDBatch.collate(plain)
    batch = THDBatch.collate([as_ids(record) for record in RECORDS], pad_to=600)

    assert batch.targets[: len(one.targets)].tolist() == one.targets.tolist()
    assert batch.position_ids[: len(one.targets)].tolist() == one.position_ids.tolist()
    assert (batch.stats.real_tokens, batch.loss_tokens) == (one.stats.real_tokens, one.loss_tokens)
    assert batch.loss_scale == one.loss_scale
    assert batch.sequence_scale == pytest.approx(1 / len(RECORDS))  # a query weighs one, with its documents

    packs = batches_of(THDDataModule(RECORDS, capacity=128, global_batch=Packs(1)))
    for pack in packs:
        assert pack.loss_scale == 1 / pack.loss_tokens
        assert pack.roles is not None
        assert pack.sequence_scale == pytest.approx(1 / pack.roles.count(QUERY))

    (weight,) = batch
    assert weight.size(0) == len(RECORDS)


def test_a_step_holds_whole_examples_on_each_rank() -> None:
    examples = []
    for rank in range(2):
        data = THDDataModule(RECORDS, capacity=96, global_batch=Sequences(9))
        data.attach(rank=rank, ranks=2)
        batches = batches_of(data)
        assert all(sum(batch.lengths) <= 96 for batch in batches)
        examples += [example for batch in batches for example in examples_of(batch)]
    assert sorted(examples) == wanted(RECORDS)


def test_the_data_module_resumes_inside_an_epoch() -> None:
    def make() -> THDDataModule:
        data = THDDataModule(RECORDS, capacity=96, global_batch=Sequences(3))
        data.setup("fit")
        return data

    whole = [[examples_of(b) for b in step.microbatches] for step in make().train_steps()]
    first = make().train_steps()
    steps = iter(first)  # a loader whose iterator is gone has ended
    next(steps)
    again = make().train_steps()
    again.load_state_dict(first.state_dict())
    assert [[examples_of(b) for b in step.microbatches] for step in again] == whole[1:]
    assert len(whole) == 3


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"negative": "x"}, "has 'negative' without a query; wanted one query. Give {'query'"),
        ({"positive": "x", "negatives": ["y"]}, "'positive' and 'negatives' without a query"),
        ({"query": "x", "negative": "y"}, "a query without a positive"),
        ({"query": "x", "anchor": "z", "positive": "y"}, "has 2 queries; wanted one query"),
        (
            {"query": "x", "positive": ""},
            "positive has an empty text or no ids. Remove it, or leave the key out",
        ),
        ({"query": "x", "positive": []}, "positive has an empty text or no ids|positive is an empty list"),
        ({"query": "x", "positive": {"a": 1}, "negative": "y"}, "positive is .*wanted text or ids"),
        ({"query": "x", "positive": "y", "label": 1}, "'label' beside a query would be left out"),
        ({"query": "x", "positive": "a\0"}, "null character"),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["list", "stream"])
def test_bad_examples_are_named(record: dict[str, Any], message: str, stream: bool) -> None:
    rows = [RECORDS[0], record]
    with pytest.raises(ValueError, match=message):
        batches_of(THDDataModule(Rows(*rows) if stream else rows, capacity=128))


@pytest.mark.parametrize("column", [False, True], ids=["list", "dataset"])
def test_an_empty_list_of_negatives_is_no_negative(column: bool) -> None:
    """A row of a dataset cannot leave its key out."""
    records = [{"query": "q", "positive": "p", "negatives": rows} for rows in (["m", "n"], [])]
    data = THDDataModule(datasets.Dataset.from_list(records) if column else records, capacity=128)
    data.setup("fit")
    roles = [batch.roles for batch in data.train_dataloader()]
    assert sorted(roles[0], key=int) == [0, 0, 1, 1, 2, 2], "wanted two queries, one with two negatives"


def test_bad_examples_are_skipped_and_counted() -> None:
    rows = [*RECORDS, {"negative": "x"}]
    assert read(rows, on_error="skip") == wanted(RECORDS)


@pytest.mark.parametrize(("oversize", "stream"), [("truncate", False), ("split", False), ("truncate", True)])
def test_an_example_is_never_cut(oversize: Any, stream: bool) -> None:
    rows = [*RECORDS, {"query": "long", "positive": "x" * 200}]
    data = THDDataModule(Rows(*rows) if stream else rows, capacity=128, oversize=oversize)
    with pytest.raises(ValueError, match=r"is a query with its documents.*cannot be cut.*tokenizer=lambda"):
        batches_of(data)


def test_long_examples_may_be_dropped() -> None:
    rows = [*RECORDS, {"query": "long", "positive": "x" * 200}]
    assert read(rows, oversize="drop") == wanted(RECORDS)


def test_layouts_and_batches_that_would_part_examples_are_refused() -> None:
    sample = as_ids(RECORDS[0])
    with pytest.raises(ValueError, match="padded one by one, as context parallelism"):
        THDBatch.collate([sample], align=Alignment(sequence_multiple=4, total_multiple=4))
    with pytest.raises(ValueError, match="Sample 1 has no query, but others"):
        THDBatch.collate([sample, {"input_ids": [1, 2]}])
    with pytest.raises(ValueError, match="share_prefixes=True with queries and documents"):
        THDBatch.collate([sample], share_prefixes=True)
    with pytest.raises(ValueError, match="positive is text; wanted ids. THDDataModule tokenises"):
        THDBatch.collate([{"query": [1], "positive": "text"}])
    with pytest.raises(ValueError, match="has the roles.*wanted 0 for a query"):
        places_of((0, 2))

    data = THDDataModule(RECORDS, capacity=128, global_batch=Packs(2))
    data.attach(accumulate=2)
    with pytest.raises(MisconfigurationException, match="accumulate_grad_batches=2 with queries.*Sequences"):
        batches_of(data)


TEXTS = [{"text": f"plain text {i}"} for i in range(9)]
IDS = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]} for _ in range(9)]


@pytest.mark.parametrize("first", [True, False], ids=["pairs first", "text first"])
@pytest.mark.parametrize("others", [TEXTS, IDS], ids=["text", "ids"])
def test_a_mixture_of_pairs_and_plain_sequences_is_refused_at_setup(first: bool, others: Any) -> None:
    sources = {"pairs": (RECORDS, 1.0), "plain": (others, 1.0)}
    data = THDDataModule(sources if first else dict(reversed(sources.items())), capacity=128)
    with pytest.raises(
        ValueError,
        match="'pairs' holds queries with documents, but 'plain' of the same mixture has plain sequences",
    ):
        data.setup("fit")


def test_plain_rows_among_rows_of_pairs_are_refused_at_setup() -> None:
    data = THDDataModule([*IDS, *map(as_ids, RECORDS)], capacity=128)
    with pytest.raises(ValueError, match="Sequence 9 has documents, but .* have no documents .9 of 18"):
        data.setup("fit")


def test_an_empty_microbatch_of_pairs_is_one_without_queries() -> None:
    data = THDDataModule(RECORDS[:1], capacity=128, global_batch=Sequences(1))
    data.attach(rank=1, ranks=2)
    (batch,) = batches_of(data)
    assert batch.roles == ()
    assert torch.equal(batch.input_ids, torch.zeros(1, dtype=torch.int64))
