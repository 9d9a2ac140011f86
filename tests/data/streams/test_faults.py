"""What ends or spoils streams: each is right, or a clear error on every rank within its time-out."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import lightning.pytorch as L
import numpy as np
import pytest
import torch.distributed as dist
from datasets.distributed import split_dataset_by_node
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_thd import Sequences, THDDataModule
from lightning_thd.data.streams import Stream
from tests.data.streams.jobs import counted, describe, module, run, write_shards
from tests.ranks import RankError, pretended_ranks, run_ranks
from tests.tiny import TinyModule, quiet_trainer


def caught(folder: str, kwargs: dict[str, Any]) -> str:
    try:
        run(f"{folder}/*.jsonl", **kwargs)
    except (ValueError, RuntimeError) as err:
        return f"{type(err).__name__}: {err}"
    return "nothing"


def test_a_bad_record_ends_every_rank_with_its_place_or_is_skipped(tmp_path: Path) -> None:
    write_shards(tmp_path, [20, 20])
    lines = (tmp_path / "001.jsonl").read_text().splitlines()
    lines[3], lines[5], lines[7] = "{", '{"input_ids": [1, -4]}', '{"input_ids": []}'
    (tmp_path / "001.jsonl").write_text("\n".join(lines))
    messages = run_ranks(caught, 2, str(tmp_path), {"n": 6}, timeout_s=60)
    for message in messages:
        assert "Rank 1: shard" in message
        assert "001.jsonl, row 3: not JSON" in message
        assert "on_error='skip'" in message
    loader = module(f"{tmp_path}/*.jsonl", n=6, on_error="skip").train_steps()
    used = [i for step in loader for batch in step.microbatches for i in batch.sequence_ids]
    assert len(used) == len(set(used)) == 37
    assert loader.counts["bad"] == 3
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


@pytest.mark.parametrize(
    ("kwargs", "left", "lost"),
    [
        ({"oversize": "truncate"}, [3, 8, 8], None),
        ({"oversize": "drop"}, [3, 8], None),
        ({"oversize": "own_pack"}, [3, 8, 13], None),
        ({"oversize": "error"}, None, "13 tokens but capacity=8. Set oversize='truncate', 'drop'"),
        ({"oversize": "split"}, None, "oversize='split' needs every length before the first step"),
        (
            {"vocab_size": 12, "oversize": "own_pack"},
            None,
            "the token id 12, but the model's vocabulary",
        ),
    ],
)
def test_long_sequences(kwargs: dict[str, Any], left: list[int] | None, lost: str | None) -> None:
    def source() -> Iterator[dict[str, Any]]:
        for length in (3, 8, 13):
            yield {"input_ids": np.arange(length), "labels": np.arange(length)}

    if lost is not None:
        with pytest.raises(ValueError, match=lost):
            run(source, capacity=8, n=3, **kwargs)
        return
    loader = module(source, capacity=8, n=3, **kwargs).train_steps()
    seen = [describe(step) for step in loader]
    name = {"truncate": "truncated", "drop": "dropped", "own_pack": "own_pack"}[kwargs["oversize"]]
    assert loader.counts[name] == 1
    assert loader.counts["tokens_lost"] == {"truncate": 5, "drop": 13, "own_pack": 0}[kwargs["oversize"]]
    lengths = [len(row) for step in seen for batch in step["tokens"] for row in batch]
    assert sorted(lengths) == left


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
    (lambda: iter([1.5]), {}, "a float is no sequence"),
    (lambda: iter([]), {}, "A pass over the stream gave no step"),
    (lambda: iter([{"input_ids": []}]), {}, "the sequence has no tokens.*empty='drop'"),
    (lambda: iter([image]), {"capacity": 8, "oversize": "truncate"}, "carries pixel_values, so it cannot be"),
    (one_row, {"n": 9, "tail": "drop"}, "too few sequences for one step of Sequences"),
    (one_row, {"packs": True, "n": 1, "scheduler": lambda lengths, capacity, **_: []}, r"cannot serve Packs"),
    (one_row, {"schedule": [0]}, "A schedule numbers the sequences of a dataset with"),
    (({"input_ids": [1, 2]} for _ in range(4)), {"epochs": 2, "n": 2}, "can be read one time"),
    (split_by_rank(), {}, r"IterableDataset was split by rank \(split_dataset_by_node\),"),
    ([], {}, "The stream has no shards"),
    (5, {}, "int is no stream"),
    ("/nowhere/*.jsonl", {}, "no file matches it"),
    (__file__, {}, "py cannot be streamed. Shards are"),
]


@pytest.mark.parametrize(("source", "options", "message"), REFUSED)
def test_what_is_no_stream_or_does_not_fit_one(source: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, MisconfigurationException), match=message):
        run(source, **options)


def test_streams_do_not_evaluate_and_have_no_dynamic_degrees() -> None:
    with pytest.raises(ValueError, match="val is a stream .*train may be a stream"):
        THDDataModule(capacity=8, val=lambda: iter([]))
    data = THDDataModule(dying, capacity=8)
    data._attached = replace(data._attached, sharing=Any)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="context_parallel_size='dynamic' plans a degree"):
        data.train_steps()


def of_part(kind: str, part: int, parts: int) -> Iterator[Any]:
    """Begin a part of a source with one fault, on rank 1 alone where it is of one rank."""
    for row in range(30):
        ids = np.arange(4 + (row * 7 + part) % 5 * (kind == "shapes")) + part
        record: dict[str, Any] = {"input_ids": ids}
        if kind == "labels on some" and part == 1:
            record["labels"] = ids
        elif kind == "dtypes" and part == 1:
            record["pixel_values"] = np.ones((2, 3), np.float64)
        elif kind == "dtypes":
            record["pixel_values"] = np.ones((2, 3), np.float32)
        elif kind == "shapes":
            record["pixel_values"] = np.ones((2, 3 + part), np.float32)
        elif kind == "raises" and part == 1 and row == 2:
            raise RuntimeError("the third record")
        elif kind == "no sequence" and part == 1 and row == 2:
            yield [1, 2, 3]
            continue
        elif kind == "nested" and part == 1 and row == 2:
            record["input_ids"] = [[1, 2], [3]]
        yield record


def attacked(kinds: list[str]) -> list[str]:
    found = []
    for kind in kinds:
        try:
            seen, *_ = run(partial(of_part, kind), n=8, window=6, timeout_s=20)
            found.append(f"{len(seen)} steps")
        except (ValueError, TypeError, RuntimeError) as err:
            found.append(f"{type(err).__name__}: {err}")
    return found


WANTED = {
    # A sequence without labels learns every token, as it does beside one with labels in a dataset.
    "labels on some": "^8 steps$",
    "dtypes": "8 steps|Rank [01]: Samples carry 'pixel_values'",
    "shapes": "Rank [01]: Samples carry 'pixel_values'",
    "raises": "Rank 1: shard .* part 1, row 2: reading stopped: the third record",
    "no sequence": "Rank 1: shard .*row 2: a list is no sequence",
    "nested": "Rank 1: shard .*row 2: .*input_ids",
}


def test_faults_of_one_rank_end_all_of_them_with_its_place() -> None:
    ranks = run_ranks(attacked, 2, list(WANTED), timeout_s=120)
    for found in ranks:
        for (kind, wanted), message in zip(WANTED.items(), found, strict=True):
            assert re.search(wanted, message, re.S), (kind, message)


def trainer(**kwargs: Any) -> L.Trainer:
    return quiet_trainer(**{"strategy": "thd", "max_epochs": 1, **kwargs})


class Seen(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.ids += batch.sequence_ids
        return super().training_step(batch, batch_idx)


def test_epochs_that_a_trainer_ends_early_lose_nothing(tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    write_shards(tmp_path, [60])
    module, states = Seen(), []

    class Saves(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            loader = trainer.fit_loop._combined_loader.flattened[0]
            states.append((len(module.ids), loader.state_dict()))

    data = THDDataModule(Stream(f"{tmp_path}/*.jsonl", window=8), capacity=200, global_batch=Sequences(5))
    trainer(max_epochs=4, limit_train_batches=3, callbacks=[Saves()]).fit(module, data)
    assert len(module.ids) == len(set(module.ids)) == 60
    for used, state in states[:-1]:
        rest = run(f"{tmp_path}/*.jsonl", state=state, n=5, capacity=200, window=8)
        assert sorted([*module.ids[:used], *counted([rest]).elements()]) == list(range(60)), used


def unequal(folder: str) -> str:
    source = f"{folder}/{dist.get_rank()}/*.jsonl"
    try:
        run(source, n=4, window=4, timeout_s=10)
    except (ValueError, RuntimeError) as err:
        return str(err)
    return "nothing"


def test_ranks_that_list_other_shards(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        write_shards(tmp_path / str(rank), [5 + rank] * (1 + rank))
    for message in run_ranks(unequal, 2, str(tmp_path), timeout_s=60):
        assert "The ranks list other shards: rank 0 has 1, rank 1 has 2" in message


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"lengths": [1, 2]}, "carries lengths, as a row of several sequences does, and a sample is one:"),
        ({"position_ids": [0, 0, 1]}, "its position_ids begin again inside it, as in a row of several"),
        ({"next_label": 5}, "it carries 'next_label', which a stream does not read"),
        ({"pixel_values": [[1.0]]}, "carries 'pixel_values' as list. Extras are tensors"),
        ({"audio": [1.0]}, "Samples carry 'audio': audio inputs cannot be packed"),
        ({"input_ids": np.ma.MaskedArray([1, 2, 3], [0, 0, 1])}, "input_ids is a masked array, whose mask"),
    ],
)
def test_what_a_stream_would_lose(more: dict[str, Any], message: str) -> None:
    plain = {"input_ids": [1, 2, 3], "url": "a", "score": 0.5, "images": None, "lengths": None}
    assert len(run(lambda: iter([plain, {**plain, "position_ids": [0, 1, 2]}]), n=2)[0]) == 1
    with pytest.raises(ValueError, match=f"row 1: .*{message}"):
        run(lambda: iter([plain, {**plain, **more}]), n=1)


def test_ranks_without_a_job(tmp_path: Path) -> None:
    write_shards(tmp_path, [12, 3])
    data = THDDataModule(Stream(source=f"{tmp_path}/*.jsonl"), capacity=64)
    data.attach(rank=0, ranks=2)
    with (
        pretended_ranks(1, backend="gloo"),
        pytest.raises(ValueError, match=r"The ranks of the job have the data ranks \[0\]; wanted each of 0"),
    ):
        next(iter(data.train_steps()))
