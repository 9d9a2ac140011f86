"""Messages about streams that no other test of the room meets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_thd import Packs, THDDataModule
from lightning_thd.data.streams import Stream
from lightning_thd.data.streams.ranks import Peers
from tests.data.streams.jobs import module, write_shards
from tests.ranks import pretended_ranks


def loader(source: Any, **kwargs: Any) -> Any:
    data = THDDataModule(Stream(source=source), capacity=8, **kwargs)
    data.setup("fit")
    return data.train_steps()


def for_three(packs: int) -> Any:
    data = THDDataModule(rows, capacity=8)
    data.attach(ranks=3)
    data.global_batch = Packs(packs)
    return data.train_dataloader()


def rows() -> Any:
    return iter([{"input_ids": [1, 2]}])


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "no shards": (lambda: loader([]), "The stream has no shards: its source is an empty list. Pass at least"),
    "no stream": (lambda: loader(5), "int is no stream. Pass paths, an IterableDataset, or a function that"),
    "no wait": (lambda: Stream(source=rows, timeout_s=0), "timeout_s=0; wanted"),
    "packs that ranks do not share": (lambda: for_three(4), r"Packs\(n=4\) cannot be shared by 3"),
    "a scheduler of packs": (
        lambda: loader(rows, scheduler=lambda lengths, capacity, **_: []),
        r"A scheduler cannot serve Packs\(n=1\). Pass global_batch=Sequences\(n\)",
    ),
    "a schedule": (lambda: loader(rows, schedule=[0]), "A schedule numbers the sequences of a dataset with"),
    "an image that would be cut": (
        lambda: next(
            iter(
                loader(
                    lambda: iter([{"input_ids": [*range(9)], "pixel_values": np.ones((1, 2))}]),
                    oversize="truncate",
                )
            )
        ),
        "Sequence 0 has 9 tokens, more than fit a pack, and carries pixel_values, so it cannot be cut",
    ),
}


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
    assert len(list(loader(lambda: iter([plain, {**plain, "position_ids": [0, 1, 2]}])))) == 1
    with pytest.raises(ValueError, match=f"row 1: .*{message}"):
        list(loader(lambda: iter([plain, {**plain, **more}])))


@pytest.mark.parametrize("case", CASES)
def test_message(case: str) -> None:
    call, message = CASES[case]
    with pytest.raises(Exception, match=message) as raised:
        call()
    assert (
        isinstance(raised.value, ValueError | TypeError) or "Misconfiguration" in type(raised.value).__name__
    )


def test_a_dataset_that_was_split_by_rank() -> None:
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    whole = datasets.Dataset.from_dict({"input_ids": [[1], [2]]}).to_iterable_dataset()
    with pytest.raises(ValueError, match=r"IterableDataset was split by rank \(split_dataset_by_node\),"):
        loader(split_dataset_by_node(whole, rank=0, world_size=2))


def test_a_state_of_another_version(tmp_path: Path) -> None:
    write_shards(tmp_path, [12])
    steps = module(f"{tmp_path}/*.jsonl").train_steps()
    next(iter(steps))
    state = steps.state_dict()
    state["stream"]["version"] = 1
    steps.load_state_dict(state)
    with pytest.raises(ValueError, match="The checkpoint holds version 1 of a stream's state, and this"):
        next(iter(steps))


def test_ranks_without_a_job(tmp_path: Path) -> None:
    write_shards(tmp_path, [12, 3])
    data = THDDataModule(Stream(source=f"{tmp_path}/*.jsonl"), capacity=64)
    data.attach(rank=0, ranks=2)
    with (
        pretended_ranks(1, backend="gloo"),
        pytest.raises(ValueError, match=r"The ranks of the job have the data ranks \[0\]; wanted each of 0"),
    ):
        next(iter(data.train_steps()))


def test_a_reader_that_gives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Timed out waiting 1000ms")

    monkeypatch.setattr("lightning_thd.data.streams.ranks.host_group", lambda ranks, timeout_s: None)
    monkeypatch.setattr("lightning_thd.data.streams.ranks.broadcast_object", closed)
    peers = Peers([0], [0, 1], 1, timeout_s=1.0)
    with pytest.raises(RuntimeError, match="Rank 1, one of .* waited for the others in vain"):
        peers.receive()
