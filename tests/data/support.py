"""What several tests of the data module use: a quiet Trainer, the capacity of its packs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as L
import numpy as np
from torch.utils.data import IterableDataset

from lightning_thd import THDBatch, THDDataModule
from lightning_thd.data.read.sources import Opener
from lightning_thd.data.store.index import MapDataset, SequenceIndex
from lightning_thd.packing import Spans
from tests.tiny import quiet_trainer

CAPACITY = 48


class Rows(IterableDataset[Any]):
    """Rows that can only be iterated."""

    def __init__(self, *rows: Any) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)


def make_trainer(**kwargs: Any) -> L.Trainer:
    return quiet_trainer(**{"max_epochs": 1, "log_every_n_steps": 1, **kwargs})


def flat(seen: list[tuple[int, ...]]) -> list[int]:
    return [i for ids in seen for i in ids]


def open_source(path: Any, **how: Any) -> MapDataset:
    """Open paths as a dataset of token ids; the arguments are those of ``THDDataModule``."""
    return Opener(**how).open(path).dataset


def read_piece(
    index: SequenceIndex, dataset: MapDataset, i: int, start: int, stop: int, continued: bool = False
) -> dict[str, Any]:
    """Read one piece of a sequence as a batch does."""
    piece = Spans(
        index=np.array([i]),
        start=np.array([start]),
        stop=np.array([stop]),
        continued=np.array([continued]),
    )
    return index.samples(dataset, piece)[0]


def batches_of(data: THDDataModule) -> list[THDBatch]:
    """Set a module up and return the packs of an epoch."""
    data.setup("fit")
    return [batch for step in data.train_steps() for batch in step.microbatches]


def read(train: Any, **how: Any) -> list[list[int]]:
    """Return the ids of every sequence of an epoch, sorted."""
    batches = batches_of(THDDataModule(train, capacity=64, **how))
    return sorted(row.tolist() for batch in batches for row in batch.unpack(batch.input_ids))
