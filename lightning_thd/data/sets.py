"""A source of one stage -> its data, opened and counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_thd.data.mixing import MixedRows, join_indices
from lightning_thd.data.read.sources import Opener, Source
from lightning_thd.data.store.index import Empty, MapDataset, SequenceIndex, build_index

_TITLES = {"train": "Train", "val": "Validation", "test": "Test", "predict": "Predict"}
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
        weights: of a mixture, the share of each source in any unit; None where there is one source.
        lengths: of a mixture, the tokens of the sequences of each source.
    """

    name: str
    dataset: MapDataset
    index: SequenceIndex
    key: dict[str, Any] | None
    schedule: NDArray[np.int64] | None = None
    weights: dict[str, float] | None = None
    lengths: dict[str, NDArray[np.integer]] | None = None

    @property
    def skipped(self) -> int:
        """Return how many bad records and rows were left out."""
        return len(self.index.bad) + int(getattr(self.dataset, "skipped", 0))


class ListsSets:
    """Gives a data module its text: how many sequences each set has, as Lightning writes it."""

    _sources: Mapping[str, Any]
    _sets: Mapping[str, DataSet]
    _stream: Any

    def __str__(self) -> str:
        """Return a line a stage; a set that is not set up has ``None``, a stream ``size=NA``.

        No loader is made for it, as Lightning's own text does, which starts reading a training set.
        """
        lines = []
        for stage in ("train", "val", "test", "predict"):
            names = [name for name in self._sources if name.partition("/")[0] == stage]
            sizes = [f"size={len(self._sets[n].index.lengths)}" if n in self._sets else "None" for n in names]
            if stage == "train" and self._stream is not None:
                sizes = ["size=NA"]
            several = len(sizes) > 1
            told = " ; ".join(f"{i}. {size}" if several else size for i, size in enumerate(sizes, start=1))
            lines.append(f"{{{_TITLES[stage]} dataloader: {told or None}}}")
        return "\n".join(lines)


def open_mixture(name: str, sources: Mapping[str, Any], opener: Opener, *, empty: Empty) -> DataSet:
    """Open the sources of a mixture, each ``(source, weight)``, and lay them end to end.

    Raises:
        TypeError: for what is no source with a weight.
        ValueError: as :func:`open_set`, and for rows that were packed before and are to stay packs.
    """
    opened = {}
    for part, given in sources.items():
        source, _ = weighted(part, given)
        opened[part] = open_set(f"{name}/{part}", source, opener, empty=empty)
        if opened[part].schedule is not None:
            raise ValueError(
                f"{part!r} holds ready packs, which a mixture takes apart. Set packed='sequences'."
            )
    keys = [data.key for data in opened.values()]
    return DataSet(
        name=name,
        dataset=MixedRows({part: data.dataset for part, data in opened.items()}),
        index=join_indices([data.index for data in opened.values()]),
        key=None if None in keys else {"mixture": keys},
        weights={part: weighted(part, given)[1] for part, given in sources.items()},
        lengths={part: data.index.lengths for part, data in opened.items()},
    )


def is_mixture(source: object) -> bool:
    """Return whether a source is a dict of named sources, not a dataset of columns or splits."""
    if not isinstance(source, Mapping) or not source:
        return False
    columns = any(name in source for name in ("input_ids", "labels", "text", "messages"))
    return (not columns and not any(hasattr(part, "column_names") for part in source.values())) or (
        all(isinstance(part, tuple | list) and len(part) == 2 for part in source.values())
    )


def weighted(name: str, given: object) -> tuple[Any, float]:
    """Check a ``(source, weight)`` pair and return its two values.

    Raises:
        TypeError: for anything but a pair of a source and a number.
    """
    if isinstance(given, tuple | list) and len(given) == 2:
        source, weight = given
        if isinstance(weight, int | float) and not isinstance(weight, bool):
            return source, float(weight)
    raise TypeError(
        f"train[{name!r}] is a {type(given).__name__}, wanted (source, weight), for example "
        f"{{{name!r}: ('{name}.jsonl', 0.3), ...}}. Weights are numbers in any unit."
    )


def open_set(name: str, source: Source, opener: Opener, *, empty: Empty) -> DataSet:
    """Open a source and count its sequences.

    Raises:
        ValueError: for a source that holds no sequences, or bad ones.
    """
    opened = opener.open(source)
    index = build_index(
        opened.dataset,
        empty=empty,
        on_error=opener.on_error,
        max_errors=opener.max_errors,
        num_workers=opener.num_workers,
        progress=len(opened.dataset) > _BAR_FROM and opener.progress,
        key=opened.key,
        cache_dir=opener.cache_dir,
        one_each=opener.packed != "off",
    )
    return DataSet(
        name=name,
        dataset=opened.dataset,
        index=index,
        key=None if opened.key is None else {**opened.key, "empty": empty},
        schedule=opened.schedule,
    )


def named_sources(sources: Mapping[str, Any]) -> dict[str, Any]:
    """Name each source that is given; of an evaluation stage that has several, as in ``val/code``."""
    named: dict[str, Any] = {}
    for stage, source in sources.items():
        if stage != "train" and is_mixture(source):
            named |= {f"{stage}/{name}": one for name, one in source.items()}
        elif source is not None:
            named[stage] = source
    return named


def names_by_stage(sources: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the names of each stage's several sets: of ``val/a`` and ``val/b``, a and b of val."""
    found: dict[str, tuple[str, ...]] = {}
    for stage, _, name in (source.partition("/") for source in sources):
        if name:
            found[stage] = (*found.get(stage, ()), name)
    return found
