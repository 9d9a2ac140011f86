"""A source of one stage -> its data, opened and counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_thd.data.read.sources import Opener, Source
from lightning_thd.data.store.index import Empty, MapDataset, SequenceIndex, build_index

_BAR_FROM = 10_000  # sequences: below it counting takes less than a second


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSet:
    """The data of one stage, opened and counted.

    Attributes:
        name: ``"train"``, ``"val"``, ..., or ``"val/code"`` where a stage has several.
        dataset: gives ids, sequence by sequence.
        index: lengths and loss tokens of the sequences.
        key: what its content and its policies are known by, for caches; None where nothing tells.
        schedule: ints ``[N]``, the ready pack of each sequence, where rows are kept as packs.
    """

    name: str
    dataset: MapDataset
    index: SequenceIndex
    key: dict[str, Any] | None
    schedule: NDArray[np.int64] | None = None


def open_set(name: str, source: Source, opener: Opener, *, empty: Empty) -> DataSet:
    """Open a source and count its sequences.

    Args:
        name: of the stage, for messages.
        source: what ``THDDataModule`` takes.
        opener: how it is opened.
        empty: what becomes of a sequence without tokens.

    Raises:
        ValueError: for a source that holds no sequences, or bad ones.
    """
    opened = opener.open(source)
    index = build_index(
        opened.dataset,
        empty=empty,
        num_workers=opener.num_workers,
        progress=len(opened.dataset) > _BAR_FROM and opener.progress,
        key=opened.key,
        cache_dir=opener.cache_dir,
    )
    return DataSet(
        name=name,
        dataset=opened.dataset,
        index=index,
        key=None if opened.key is None else {**opened.key, "empty": empty},
        schedule=opened.schedule,
    )
