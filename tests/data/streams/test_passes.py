"""Each pass over a stream begins with ``set_epoch``, so that a source that shuffles gives another order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainingArguments

from lightning_thd import Packs, THDDataModule
from lightning_thd.data.streams import Stream
from lightning_thd.integrations import packed_trainer
from tests.data.streams.jobs import run
from tests.tiny import TinyModule, tiny_llama

SIZE = 20


def order_of(epoch: int) -> list[int]:
    return np.random.default_rng(epoch).permutation(SIZE).tolist()


class Reordered(IterableDataset):
    """Twenty records in an order that depends on the epoch, which is the first token of each."""

    def __init__(self) -> None:
        self.epoch = -1  # no token id: a pass without set_epoch ends with an error
        self.begun: list[int] = []  # the epoch of each iteration

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        self.begun.append(self.epoch)
        epoch = self.epoch
        for i in order_of(epoch) if epoch >= 0 else range(SIZE):
            yield {"input_ids": [epoch, i, i + 1]}


class ReorderedWithState(Reordered):
    """The same with a state: the position in the pass, and not the epoch, which it is told."""

    def __init__(self) -> None:
        super().__init__()
        self._used = 0

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        start = self._used
        for number, record in enumerate(super().__iter__()):
            if number >= start:
                self._used = (number + 1) % SIZE
                yield record

    def state_dict(self) -> dict[str, int]:
        return {"used": self._used}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._used = state["used"]


def steps_of(epoch: int, n: int = 5) -> list[list[list[int]]]:
    """Return the records of each step of a pass, sorted."""
    order = order_of(epoch)
    return [sorted([epoch, i, i + 1] for i in order[first : first + n]) for first in range(0, SIZE, n)]


def content(steps: list[dict[str, Any]]) -> list[list[list[int]]]:
    return [sorted(row for batch in step["tokens"] for row in batch) for step in steps]


SOURCES = {
    "dataset": Reordered,
    "dataset with a state": ReorderedWithState,
    "function": lambda: Reordered,
    "loader": lambda: DataLoader(Reordered(), batch_size=None),
}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.filterwarnings("ignore:.*forking the process", "ignore:The stream cannot save its position")
def test_each_pass_has_the_order_of_its_epoch_also_after_a_resume(kind: str, workers: int) -> None:
    expected = [step for epoch in range(3) for step in steps_of(epoch)]
    options: dict[str, Any] = {"n": 5, "window": 5, "num_workers": workers}
    whole, _ = run(SOURCES[kind](), epochs=3, **options)
    assert content(whole) == expected
    for cut in (2, 4, 6, 9):
        first, state = run(SOURCES[kind](), epochs=3, steps=cut, **options)
        rest, _ = run(SOURCES[kind](), state=state, epochs=3 - state["epoch"], **options)
        assert content(first + rest) == expected, f"resumed after step {cut} of 12"


@pytest.mark.parametrize("shards", [1, 2])
def test_a_shuffled_dataset_of_hugging_face_is_shuffled_anew_in_each_pass(shards: int) -> None:
    rows = [{"input_ids": [i, i + 1, i + 2]} for i in range(SIZE)]
    dataset = Dataset.from_list(rows).to_iterable_dataset(num_shards=shards).shuffle(seed=0, buffer_size=8)
    steps, _ = run(dataset, epochs=3, n=5, window=5)
    passes = [content(steps[first : first + 4]) for first in (0, 4, 8)]
    for read in passes:
        assert sorted(row for step in read for row in step) == [row["input_ids"] for row in rows]
    assert passes[0] != passes[1] != passes[2] != passes[0]
    if shards == 1:
        for epoch, read in enumerate(passes):
            dataset.set_epoch(epoch)
            order = [row["input_ids"] for row in dataset]
            assert read == [sorted(order[first : first + 5]) for first in range(0, SIZE, 5)]


def test_a_lightning_trainer_reads_each_epoch_in_its_own_order() -> None:
    dataset = Reordered()
    data = THDDataModule(Stream(dataset, window=5), capacity=64, global_batch=Packs(1))
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(TinyModule(), datamodule=data)
    assert dataset.begun[:3] == [0, 1, 2]


def test_a_trainer_of_transformers_reads_each_pass_in_its_own_order(tmp_path: Path) -> None:
    dataset = Reordered()
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=12, report_to=[], use_cpu=True, disable_tqdm=True, save_steps=100
    )
    model = tiny_llama()
    trainer = packed_trainer()(
        model=model,
        args=arguments,
        train_dataset=Stream(dataset, window=5),
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None),
        capacity=15,  # five records, so that a pass has four packs
        peak=1e12,
    )
    trainer.train()

    assert dataset.begun[:3] == [0, 1, 2]
