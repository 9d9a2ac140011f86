"""Sources -> data sets, opened and counted; the sources of a mixture lie end to end in one data set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset

from lightning_thd._checks import described
from lightning_thd.batch.examples import PARTS, is_example
from lightning_thd.batch.media import COLUMNS, ExtrasCost
from lightning_thd.data.read.sources import Opener, Source
from lightning_thd.data.read.vision_chat import ChatRows
from lightning_thd.data.store.index import (
    Empty,
    MapDataset,
    Places,
    SequenceIndex,
    build_index,
    keeps_rows,
)

_BAR_FROM = 10_000  # Up to this many sequences are counted in less than a second, without a progress bar.


class MixedRows(ConcatDataset[dict[str, Any]]):
    """Several datasets laid end to end."""

    def __init__(self, datasets: Mapping[str, Any]) -> None:
        super().__init__(datasets.values())
        self.skipped = sum(int(getattr(dataset, "skipped", 0)) for dataset in self.datasets)

    @property
    def keeps_rows(self) -> bool:
        """Return whether the rows of all datasets stay unchanged when other rows are read."""
        return all(map(keeps_rows, self.datasets))


def join_indices(indices: list[SequenceIndex]) -> SequenceIndex:
    """Join the sequence indices of datasets end to end, as ``MixedRows`` joins the datasets."""
    counts = [len(index.lengths) for index in indices]
    starts = (np.cumsum(counts) - counts).tolist()
    pairs = list(zip(indices, starts, strict=True))
    return SequenceIndex(
        lengths=np.concatenate([index.lengths for index in indices]),
        loss_tokens=np.concatenate([index.loss_tokens for index in indices]),
        media=np.concatenate([index.media + start for index, start in pairs]),
        # Sequences without weights have the weight 1 for each loss token, and as a whole.
        weights=_join_columns(
            [index.weights for index in indices],
            default=lambda k: indices[k].loss_tokens,
        ),
        sequence_weights=_join_columns(
            [index.sequence_weights for index in indices],
            default=lambda k: np.ones(counts[k]),
        ),
        largest=_join_largest([(index.largest, start) for index, start in pairs]),
        largest_label=_join_largest([(index.largest_label, start) for index, start in pairs]),
        bad=np.concatenate([index.bad + start for index, start in pairs]),
        sizes=_join_columns(
            [index.sizes for index in indices],
            default=lambda k: np.zeros((counts[k], COLUMNS), np.int64),
        ),
        sizes_measured=all(index.sizes_measured for index in indices),
        checked=all(index.checked for index in indices),
        places=_join_places(pairs),
    )


def _join_largest(largest: list[tuple[NDArray[np.integer], int]]) -> NDArray[np.integer]:
    """Return the largest of several ``[value, row]``, each with the row at which its dataset starts."""
    (value, row), start = max(largest, key=lambda pair: int(pair[0][0]))
    return np.array([value, row + start])


def _join_places(pairs: list[tuple[SequenceIndex, int]]) -> Places:
    """Join the files of datasets end to end; rows of a dataset without files have only their number."""
    names: list[str | Callable[[int], str]] = []
    ends: list[int] = []
    for index, start in pairs:
        places = index.places
        names += places.names or ("",)
        ends += [start + end for end in places.ends] or [start + len(index.lengths)]
    return Places(names=tuple(names), ends=tuple(ends))


def _join_columns(columns: list[NDArray[Any]], *, default: Callable[[int], NDArray[Any]]) -> NDArray[Any]:
    """Join columns end to end; empty ones are replaced by ``default(k)``, unless all are empty."""
    if not any(len(column) for column in columns):
        return columns[0]
    return np.concatenate([column if len(column) else default(k) for k, column in enumerate(columns)])


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSet:
    """One data set of a stage, opened and counted."""

    name: str  # ``"train"``, ``"val"``, ..., or ``"val/code"`` if ``val`` is a dict
    dataset: MapDataset  # ``[i]`` gives the ids of a sequence
    index: SequenceIndex  # lengths and loss tokens of the sequences
    key: dict[str, Any] | None  # cache key of content and policies; None if unknown or with extras_cost
    schedule: NDArray[np.int64] | None = None  # the index of each sequence's pack, if rows are packs
    weights: dict[str, float] | None = None  # the share of each source of a mixture, in any unit
    lengths: dict[str, NDArray[np.integer]] | None = None  # the lengths in each source of a mixture

    @property
    def skipped(self) -> int:
        """Return how many bad records and rows were left out."""
        return len(self.index.bad) + int(getattr(self.dataset, "skipped", 0))


def open_mixture(name: str, sources: Mapping[str, Any], opener: Opener, **options: Any) -> DataSet:
    """Open the sources of a mixture, each ``(source, weight)``, and lay them end to end."""
    opened: dict[str, DataSet] = {}
    weights: dict[str, float] = {}
    for part, entry in sources.items():
        source, weight = weighted(part, entry)
        data = open_set(f"{name}/{part}", source, opener, **options)
        if data.schedule is not None:
            raise ValueError(f"{part!r} holds ready packs. In a mixture set packed='sequences'.")
        opened[part] = data
        weights[part] = weight

    _refuse_queries_beside_others(opened)
    keys = [data.key for data in opened.values()]
    return DataSet(
        name=name,
        dataset=MixedRows({part: data.dataset for part, data in opened.items()}),
        index=join_indices([data.index for data in opened.values()]),
        key=None if None in keys else {"mixture": keys},
        weights=weights,
        lengths={part: data.index.lengths for part, data in opened.items()},
    )


def _refuse_queries_beside_others(opened: Mapping[str, DataSet]) -> None:
    """Raise if some sources of a mixture hold queries with documents, and others plain sequences."""
    kinds: dict[bool, str] = {}
    for part, data in opened.items():
        filled = np.flatnonzero(data.index.lengths > 0)
        if len(filled):
            first: Any = data.dataset[int(filled[0])]
            kinds.setdefault(PARTS in first or is_example(first), part)
    if len(kinds) == 2:
        raise ValueError(
            f"{kinds[True]!r} holds queries with documents, but {kinds[False]!r} of the same mixture has "
            "plain sequences, and no loss takes both. Train on one after the other, or leave one source out."
        )


def refuse_unused_processor(processor: object, data: DataSet) -> None:
    """Raise if a processor is given, but the data have no conversations that it could render."""
    if processor is None or not len(data.dataset):
        return
    datasets = data.dataset.datasets if isinstance(data.dataset, MixedRows) else [data.dataset]
    if not any(isinstance(dataset, ChatRows) for dataset in datasets):
        raise ValueError(
            f"the {data.name} data hold ids, and processor= renders conversations. Leave processor= out."
        )


def refuse_class_names(name: str, source: Any, opener: Opener, classifier: str) -> None:
    """Raise if the ``label`` of a source's first record is text; a classifier learns only numbers."""
    parts = [entry[0] for entry in source.values()] if is_mixture(source) else [source]
    for part in parts:
        record = opener.first_record(part)
        label = record.get("label") if isinstance(record, Mapping) else None
        if isinstance(label, str):
            raise ValueError(
                f"the first record of the {name} data has label={label!r}, but {classifier} learns numbers. "
                "Map names of classes to numbers, or drop the key."
            )


def is_mixture(source: object) -> bool:
    """Return whether a source is a dict of named sources, not of columns or splits of one dataset."""
    if not isinstance(source, Mapping) or not source or hasattr(source, "column_names"):
        return False
    if all(_is_weighted(entry) for entry in source.values()):
        return True
    return not any(name in source for name in ("input_ids", "labels"))


def _is_weighted(entry: object) -> bool:
    """Return whether an entry of a dict is a pair of a source and a number."""
    is_pair = isinstance(entry, tuple | list) and len(entry) == 2
    return is_pair and isinstance(entry[1], int | float | np.number)  # type: ignore[index]


def weighted(name: str, entry: object) -> tuple[Any, float]:
    """Check a ``(source, weight)`` pair and return its two values."""
    if isinstance(entry, tuple | list) and len(entry) == 2:
        source, weight = entry
        if isinstance(weight, int | float | np.number) and not isinstance(weight, bool):
            return source, float(weight)
    raise TypeError(f"train[{name!r}] is a {type(entry).__name__}, wanted (source, weight) with a number.")


def open_set(
    name: str, source: Source, opener: Opener, *, empty: Empty, extras_cost: ExtrasCost | None = None
) -> DataSet:
    """Open a source and count its sequences."""
    opened = opener.open(source)
    one_each = opener.packed != "off"
    key = None if opened.key is None else {**opened.key, "one_each": one_each}

    index = build_index(
        opened.dataset,
        empty=empty,
        on_error=opener.on_error,
        max_errors=opener.max_errors,
        num_workers=opener.num_workers,
        progress=len(opened.dataset) > _BAR_FROM and opener.progress,
        key=key,
        cache_dir=opener.cache_dir,
        one_each=one_each,
        extras_cost=extras_cost,
        places=opened.places,
    )

    return DataSet(
        name=name,
        dataset=opened.dataset,
        index=index,
        key=None if key is None or extras_cost is not None else {**key, "empty": empty},
        schedule=opened.schedule,
    )


def named_sources(sources: Mapping[str, Any]) -> dict[str, Any]:
    """Name each source by its stage, such as ``val``; ``val/code`` if ``val`` is a dict of sources."""
    named: dict[str, Any] = {}
    for stage, source in sources.items():
        if source is None:
            continue
        if stage == "train" or not is_mixture(source):
            named[stage] = source
            continue
        for name, part in source.items():
            is_pair = isinstance(part, tuple | list) and len(part) == 2
            has_weight = is_pair and isinstance(part[1], int | float)
            if part is None or has_weight or name == "":
                raise TypeError(f"{stage}[{name!r}] is {described(part)}; wanted a named source, no weight.")
            named[f"{stage}/{name}"] = part
    return named
