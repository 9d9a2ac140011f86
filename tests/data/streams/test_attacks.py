"""What people do to streams by mistake: each is right, or a clear error on every rank within its time-out."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch.distributed as dist

from lightning_thd import Sequences, THDDataModule
from lightning_thd.data.streams import Stream
from tests.data.streams.jobs import counted, run, write_shards
from tests.ranks import run_ranks
from tests.tiny import TinyModule, quiet_trainer


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


@pytest.mark.filterwarnings("ignore:.*forking the process")
def test_workers_with_a_function_that_cannot_be_pickled() -> None:
    held = iter([])  # no pickle of this

    def source(part: int, parts: int) -> Iterator[Any]:
        yield from held
        for row in range(part, 40, parts):
            yield {"input_ids": [row, row + 1]}

    seen, *_ = run(source, n=8, num_workers=2)
    rows = sorted(row[0] for step in seen for batch in step["tokens"] for row in batch)
    assert rows == list(range(40))


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
