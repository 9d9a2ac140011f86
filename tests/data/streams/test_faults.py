"""What ends or spoils streams: each is right, or a clear error on every rank within its time-out."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.distributed as dist
from datasets.distributed import split_dataset_by_node
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_thd import THDDataModule
from tests.data.streams.jobs import caught, counted, describe, module, run, write_shards
from tests.ranks import RankError, run_ranks


def test_a_bad_record_ends_every_rank_with_its_place_or_is_skipped(tmp_path: Path) -> None:
    write_shards(tmp_path, [20, 20])
    lines = (tmp_path / "001.jsonl").read_text().splitlines()
    lines[3] = "{"
    lines[5] = '{"input_ids": [1, -4]}'
    lines[7] = '{"input_ids": []}'
    (tmp_path / "001.jsonl").write_text("\n".join(lines))
    messages = run_ranks(partial(caught, n=6), 2, f"{tmp_path}/*.jsonl", timeout_s=60)

    for message in messages:
        assert "Rank 1: shard" in message
        assert "001.jsonl, row 3: not JSON" in message
        assert "on_error='skip'" in message

    odd = json.loads(lines[9])  # a user's function raises an error for this record only
    cost = {"extras_cost": lambda record: 1 // (record != odd)}
    loader = module(f"{tmp_path}/*.jsonl", n=6, on_error="skip", **cost).train_steps()
    used = [i for step in loader for batch in step.microbatches for i in batch.sequence_ids]

    assert len(used) == len(set(used)) == 36
    assert loader.counts["bad"] == 4
    with pytest.raises(ValueError, match="3 records could not be used, more than max_errors=2.*row 7"):
        run(f"{tmp_path}/*.jsonl", n=6, on_error="skip", max_errors=2)


def dying(part: int, parts: int) -> Iterator[dict[str, Any]]:
    for row in range(100):
        if part == 1 and row == 7:
            os._exit(3)
        yield {"input_ids": np.arange(5)}


def survivor(source: Any = dying, timeout_s: float = 10) -> str:
    """Let rank 1 die while it reads; return what rank 0 is told."""
    started = time.monotonic()
    try:
        run(source, n=8, window=8, timeout_s=timeout_s)
    except RuntimeError as err:
        assert time.monotonic() - started < 30
        if dist.get_rank() == 0:
            raise AssertionError(f"survivor was told: {err}") from err
    return "nothing"


def test_a_rank_that_dies_does_not_leave_the_others_waiting() -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=r"ranks \[1\] died|survivor was told: Rank 0 of 2 .* timeout_s=10"):
        run_ranks(survivor, 2, timeout_s=60)
    assert time.monotonic() - started < 60


def test_a_worker_that_dies_is_named() -> None:
    def source() -> Iterator[dict[str, Any]]:
        yield {"input_ids": np.arange(5)}
        os.kill(os.getpid(), 9)
        yield {"input_ids": np.arange(5)}

    started = time.monotonic()
    with pytest.raises(ValueError, match="Rank 0: A worker that reads source ended: DataLoader worker"):
        run(source, n=8, num_workers=1, timeout_s=600)
    assert time.monotonic() - started < 60  # it is looked at every few seconds, whatever the time-out


def long_ones() -> Iterator[dict[str, Any]]:
    for length in (3, 8, 13):
        yield {"input_ids": np.arange(length), "labels": np.arange(length)}


def test_long_sequences() -> None:
    cases = {"truncate": ("truncated", [3, 8, 8], 5), "drop": ("dropped", [3, 8], 13)}
    for oversize, (name, left, lost) in (cases | {"own_pack": ("own_pack", [3, 8, 13], 0)}).items():
        loader = module(long_ones, capacity=8, n=3, oversize=oversize).train_steps()
        seen = [describe(step) for step in loader]
        assert (loader.counts[name], loader.counts["tokens_lost"]) == (1, lost)
        assert sorted(len(row) for step in seen for batch in step["tokens"] for row in batch) == left


def test_tails(tmp_path: Path) -> None:
    write_shards(tmp_path, [20])
    for packs, n in ((False, 8), (True, 5)):
        whole = counted([run(f"{tmp_path}/*.jsonl", n=n, packs=packs)])
        assert len(whole) == 20
        loader = module(f"{tmp_path}/*.jsonl", n=n, packs=packs, tail="drop").train_steps()
        used = [i for step in loader for batch in step.microbatches for i in batch.sequence_ids]
        assert len(used) == len(set(used)) == 20 - loader.counts["tail_dropped"] > 0
        assert packs or loader.counts["tail_dropped"] == 4


def one_row() -> Iterator[Any]:
    return iter([{"input_ids": [1, 2]}])


def split_by_rank() -> Any:
    whole = datasets.Dataset.from_dict({"input_ids": [[1], [2]]}).to_iterable_dataset()
    return split_dataset_by_node(whole, rank=0, world_size=2)


image = {"input_ids": [*range(9)], "pixel_values": np.ones((1, 2))}
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (lambda: iter([1.5]), {}, "a float is not a sequence"),
    (lambda: iter([]), {}, "A pass over the stream gave no step"),
    (lambda: iter([{"input_ids": []}]), {}, "the sequence has no tokens.*empty='drop'"),
    (
        lambda: iter([image]),
        {"capacity": 8, "oversize": "truncate"},
        "carries pixel_values, so it cannot be cut",
    ),
    (lambda: iter(lambda: image, 0), {"capacity": 8, "on_error": "skip", "max_errors": 9}, "10 records.*=9"),
    (long_ones, {"capacity": 8}, "13 tokens but capacity=8. Set oversize="),
    (long_ones, {"oversize": "split"}, "oversize='split' needs every length before the first step"),
    (long_ones, {"vocab_size": 12}, "the token id 12, but the model's vocabulary"),
    (one_row, {"n": 9, "tail": "drop"}, "too few sequences for one step of Sequences"),
    (one_row, {"packs": True, "n": 1, "scheduler": lambda lengths, capacity, **_: []}, r"cannot serve Packs"),
    (one_row, {"schedule": [0]}, "A schedule numbers the sequences of a dataset"),
    (({"input_ids": [1, 2]} for _ in range(4)), {"epochs": 2, "n": 2}, "can be read only once"),
    (split_by_rank(), {}, "IterableDataset was split by rank"),
    ([], {}, "The stream has no shards"),
    (5, {}, "int is not a stream"),
    ([{"input_ids": [1]}], {}, "dict is not a stream. Pass a list of samples"),
    (DataLoader([{"input_ids": [1]}]), {}, "DataLoader gives batches, .* Pass its dataset"),
    ("/nowhere/*.jsonl", {}, "no file matches it"),
    (__file__, {}, "py cannot be streamed. Pass .jsonl"),
]


@pytest.mark.parametrize(("source", "options", "message"), REFUSED)
def test_what_is_no_stream_or_does_not_fit_one(source: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, MisconfigurationException), match=message):
        run(source, **options)


def test_streams_do_not_evaluate_and_have_no_dynamic_degrees() -> None:
    with pytest.raises(ValueError, match="val is a stream; only train may be one"):
        THDDataModule(capacity=8, val=lambda: iter([]))
    data = THDDataModule(dying, capacity=8)
    data._attached = replace(data._attached, sharing=Any)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="context_parallel_size='dynamic' plans a degree"):
        data.train_steps()


def of_part(kind: str, part: int, parts: int) -> Iterator[Any]:
    """Begin a part of a source with one fault, on rank 1 or on one of the two."""
    for row in range(30):
        ids = np.arange(4 + (row * 7 + part) % 5 * (kind == "shapes")) + part
        record: dict[str, Any] = {"input_ids": ids}
        if kind == "labels on some" and part == 1:
            record["labels"] = ids
        elif kind == "shapes":
            record["pixel_values"] = np.ones((2, 3 + part), np.float32)
        elif kind == "one sparse":  # of rank 1, in a step that needs no reading, as all has been read
            odd = part == 1 and row == 29
            record["pixel_values"] = torch.ones(2, 3).to_sparse() if odd else torch.ones(2, 3)
        elif kind == "raises" and part == 1 and row == 2:
            raise RuntimeError("the third record")
        yield record


def attacked(kinds: list[str]) -> list[str]:
    windows = {kind: 64 if kind == "one sparse" else 6 for kind in kinds}
    return [caught(partial(of_part, k), n=8, window=window, timeout_s=20) for k, window in windows.items()]


WANTED = {
    # Every token of a sequence without labels would be learned.
    "labels on some": r"^ValueError: shard .* part [01], row 0: it has (no )?'labels', but most",
    "shapes": r"^ValueError: shard .* part [01], row 0: it has 'pixel_values' of shape \[\*, [34]\],",
    "one sparse": "Rank [01]: Samples carry 'pixel_values'",
    "raises": "Rank 1: shard .* part 1, row 2: reading stopped: the third record",
}


def test_faults_of_one_rank_end_all_of_them_with_its_place() -> None:
    ranks = run_ranks(attacked, 2, list(WANTED), timeout_s=120)
    for messages in ranks:
        for (kind, expected), message in zip(WANTED.items(), messages, strict=True):
            assert re.search(expected, message, re.S), (kind, message)


@pytest.mark.filterwarnings("ignore:The stream cannot save its position")
def test_a_record_that_fits_in_no_batch_is_a_bad_record() -> None:
    faults: list[Any] = [
        ({"label": 1}, {}, "no 'label'"),
        ({}, {"label": 1}, r"'label' of shape \[\]"),
        ({"position_ids": [0]}, {"position_ids": [[0]] * 3}, r"'position_ids' of shape \[3, \*\]"),
        ({"audio_x": np.ones((2, 3))}, {"audio_x": np.ones((1, 4))}, r"'audio_x' of shape \[\*, 4\]"),
    ]

    for (most, odd, has), odd_row in itertools.product(faults, (0, 40)):
        begin = [{"input_ids": [1], **(odd if row in (odd_row, 41) else most)} for row in range(42)].__iter__
        seen, state = run(begin, on_error="skip", max_errors=2, steps=2)
        rest, _ = run(begin, on_error="skip", max_errors=2, state=state)
        assert counted([(seen + rest, None)]) == dict.fromkeys({*range(41)} - {odd_row}, 1)

        with pytest.raises(ValueError, match=f"shard .*, row {odd_row}: it has {has}, but most"):
            run(begin)
        with pytest.raises(ValueError, match="more than max_errors=1"):
            run(begin, on_error="skip", max_errors=1)


def unequal(folder: str) -> str:
    return caught(f"{folder}/{dist.get_rank()}/*.jsonl", n=4, window=4, timeout_s=10)


def test_ranks_that_list_other_shards(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        write_shards(tmp_path / str(rank), [5 + rank] * (1 + rank))
    for message in run_ranks(unequal, 2, str(tmp_path), timeout_s=60):
        assert "The ranks list other shards: rank 0 has 1, rank 1 has 2" in message


def test_what_a_stream_would_lose() -> None:
    plain = {"input_ids": [1, 2, 3], "url": "a", "score": 0.5, "images": None, "lengths": None}
    assert len(run(lambda: iter([plain, {**plain, "position_ids": [0, 1, 2]}]), n=2)[0]) == 1
    lost: list[tuple[dict[str, Any], str]] = [
        (
            {"lengths": [1, 2]},
            "carries lengths, which marks several sequences in a row, but a sample is one sequence",
        ),
        ({"position_ids": [0, 0, 1]}, "its position_ids begin again, as in a row of several"),
        ({"next_label": 5}, "the record carries 'next_label', which only"),
        ({"pixel_values": [[1.0]]}, "carries 'pixel_values' as list. Extras are tensors"),
        ({"audio": [1.0]}, "Samples carry 'audio': audio inputs cannot be packed"),
        ({"input_ids": np.ma.MaskedArray([1, 2, 3], [0, 0, 1])}, "input_ids is a masked array, whose mask"),
    ]
    for more, message in lost:
        with pytest.raises(ValueError, match=f"row 1: .*{message}"):
            run([plain, {**plain, **more}].__iter__, n=1)


def test_blank_files_of_a_stream_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.jsonl").write_text("\n  \n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"\n\n"))
    with pytest.raises(ValueError, match=r"a\.jsonl, .*b\.jsonl\.gz has no record: it is empty or blank"):
        run([f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl.gz"])
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'\n{"input_ids": [1, 2, 3]}\n'))
    (tmp_path / "d.jsonl.gz").write_bytes(b"damaged")
    with caplog.at_level("INFO"):
        steps, _ = run([f"{tmp_path}/{name}" for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.gz")], n=1)
    assert [step["tokens"] for step in steps] == [[[[1, 2, 3]]]]
    assert "2 of 3 files have no record, because they are blank" in caplog.text
    assert "b.jsonl.gz" in caplog.text
    with pytest.raises(ValueError, match=r"d\.jsonl\.gz, row 0: reading stopped: .* is damaged"):
        run(f"{tmp_path}/d.jsonl.gz", n=1)
