"""Iterable datasets, iterables and functions that return iterators -> shards."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import IterableDataset

from lightning_thd.data.read.records import as_written
from lightning_thd.data.streams.shards.base import Mark, Rows, Shard

_NONE = object()  # marks the absence of a record
_MARK_EVERY = 64  # rows between two states that are kept: a resumed source passes over fewer
# Steps that a Hugging Face IterableDataset applies to each shard by itself when it is split.
_ACROSS = {
    "Skip": "skip()",
    "Take": "take()",
    "Step": "step()",
    "CyclingMultiSources": "interleave_datasets()",
    "RandomlyCyclingMultiSources": "interleave_datasets()",
}


class Beginning:
    """The first state of a source that saves its position, and whether a reading of it was left.

    Such a source may go on where it was left, so that a new reading has to set it back.
    """

    def __init__(self, source: Any) -> None:
        self._state: Any = None  # as it came
        self._first: bytes | None = None  # content of its first record, once it was read
        self._left = False  # whether a reading began that has not come to its end
        with contextlib.suppress(Exception):  # some sources have a state only after their first record
            self._state = _copied(source.state_dict())

    @classmethod
    def of(cls, source: Any) -> Beginning:
        """Return what is known of a source in this process, however many loaders read it."""
        try:
            found = _KNOWN.get(source)
            if found is None:
                _KNOWN[source] = found = cls(source)
        except TypeError:  # the source is not hashable, or allows no weak reference
            found = cls(source)
        return found

    def again(self, source: Any) -> Iterator[Any]:
        """Return the records of a source from the first on."""
        records = iter(source)
        left, self._left = self._left, True
        if left:
            first = next(records, _NONE)
            if first is not _NONE and (self._state is None or content_of(first) == self._first):
                return chain([first], records)
            if self._state is not None:
                source.load_state_dict(_copied(self._state))
            records = iter(source)
        return self._noting_the_first(records)

    def at(self, source: Any, state: Any) -> Iterator[Any]:
        """Return the records of a source from a saved state on."""
        self._left = True
        source.load_state_dict(_copied(state))
        return iter(source)

    def leave(self) -> None:
        """Note that the source was read to its end."""
        self._left = False

    def _noting_the_first(self, records: Iterator[Any]) -> Iterator[Any]:
        for record in records:
            if self._first is None:
                self._first = content_of(record)
            yield record


_KNOWN: weakref.WeakKeyDictionary[Any, Beginning] = weakref.WeakKeyDictionary()


def content_of(record: Any) -> bytes:
    """Return bytes that are equal for equal records."""
    try:
        return pickle.dumps(record)
    except Exception:  # a record of a class that cannot be pickled
        return repr(record).encode()


def _copied(state: Any) -> Any:
    try:
        return copy.deepcopy(state)
    except Exception:  # a state that cannot be copied is handed on as it is
        return state


def has_state(source: object) -> bool:
    """Return whether a source can save and restore its position."""
    return callable(getattr(source, "state_dict", None)) and callable(
        getattr(source, "load_state_dict", None)
    )


def _read_with_state(source: Any, start: int, mark: Mark | None, beginning: Beginning) -> Rows:
    """Read from a saved state or the first record on; each ``_MARK_EVERY``-th row brings a new state."""
    row, state = (0, None) if mark is None else mark
    records = beginning.again(source) if mark is None else beginning.at(source, state)
    for record in records:
        row += 1
        place = (row, _copied(source.state_dict())) if row % _MARK_EVERY == 0 else None
        if row > start:
            yield row - 1, record, place
    beginning.leave()


class _Drawn:
    """The iterator that a shard read last; one that a function made stays in its process."""

    def __init__(self, records: Any = None, *, travels: bool) -> None:
        self.records, self._travels = records, travels

    def __reduce__(self) -> Any:
        return partial(_Drawn, travels=self._travels), (self.records if self._travels else None,)


@dataclass(frozen=True, slots=True)
class IterableShard:
    """A shard whose records come from calling a function that returns an iterator."""

    name: str
    size: int
    begin: Callable[[], Iterable[Any]]
    skip: Callable[[Any, int], Iterable[Any]] | None = None
    beginning: Beginning | None = field(default=None, compare=False, repr=False)
    drawn: _Drawn = field(default_factory=lambda: _Drawn(travels=False), compare=False, repr=False)

    def read(self, start: int, mark: Mark | None = None) -> Rows:
        """Yield the records from row ``start`` on, from the first record or a saved state."""
        for row, record, place in self._read(start, mark):
            yield row, as_written(record), place

    def _read(self, start: int, mark: Mark | None) -> Rows:
        records = self.begin()
        if start and self.skip is not None:
            for row, record in enumerate(self.skip(records, start), start):
                yield row, record, None
        elif has_state(records) and self.skip is None:
            yield from _read_with_state(records, start, mark, self.beginning or Beginning.of(records))
        else:
            self._refuse_a_second_time(records)
            for row, record in islice(enumerate(records), start, None):
                yield row, record, None

    def _refuse_a_second_time(self, records: Any) -> None:
        """Refuse an iterator that was read before: it would go on where it was left, under the first rows."""
        if not is_iterator(records):
            return
        began = inspect.isgenerator(records) and inspect.getgeneratorstate(records) != inspect.GEN_CREATED
        if began or records is self.drawn.records:
            raise ValueError(
                f"A {type(records).__name__} object can be read one time, and it was. Pass the function that "
                "makes it in its place: THDDataModule(train=make_records, ...)."
            )
        self.drawn.records = records


def iterable_shards(source: Any, parts: int, *, prefix: str, read_once: dict[str, Any]) -> Sequence[Shard]:
    """Split a source that is no path into shards."""
    kind = f"{prefix}{type(source).__name__}"
    if is_hf(source):
        if getattr(source, "_distributed", None) is not None:
            raise ValueError(
                f"{kind} was split by rank (split_dataset_by_node), and a stream gives every rank its share. "
                "Pass the dataset before it was split."
            )
        count = int(source.num_shards)
        if count > 1 and (why := _counts_across_shards(source)) is not None:
            rank_zero_warn(
                f"{kind} has {why}, which counts rows over all its {count} shards: read apart they would "
                "give other rows than the dataset. One process reads it, front to back. To read shards "
                "side by side, leave rows out by filter(), and mix with THDDataModule({'name': (dataset, "
                "weight), ...})."
            )
            count = 1
        return [IterableShard(f"{kind} shard {i}", 1, _Part(source, i, count), _skip) for i in range(count)]
    if isinstance(source, IterableDataset) and hasattr(source, "data_rank") and hasattr(source, "data_size"):
        return [IterableShard(f"{kind} part {i}", 1, _Rank(source, i, parts)) for i in range(parts)]
    if isinstance(source, IterableDataset) or (hasattr(source, "__iter__") and not callable(source)):
        read_once[kind] = source
        if has_state(source):
            beginning = Beginning.of(source)  # goes with it into worker processes
            return [IterableShard(kind, 1, _Itself(source), beginning=beginning)]
        return [IterableShard(kind, 1, _Itself(source), drawn=_Drawn(travels=True))]
    if not callable(source):
        raise ValueError(
            f"{type(source).__name__} is no stream. Pass paths, an IterableDataset, or a function that "
            "returns an iterator over {'input_ids': ...}."
        )
    name = prefix + getattr(source, "__name__", type(source).__name__)
    if len(_positional(source)) == 2:
        return [IterableShard(f"{name} part {i}", 1, partial(source, i, parts)) for i in range(parts)]
    read_once[name] = source
    return [IterableShard(name, 1, source)]


def _counts_across_shards(dataset: Any) -> str | None:
    """Return the step of a Hugging Face IterableDataset that looks at rows of several shards, or None."""
    steps = [getattr(dataset, "_ex_iterable", None)]
    while steps:
        step = steps.pop()
        name = type(step).__name__.removesuffix("ExamplesIterable")
        if name in _ACROSS and getattr(step, "split_when_sharding", True):
            return _ACROSS[name]
        for option in ("drop_last_batch", "with_indices"):
            if getattr(step, option, False):
                return f"{option}=True"
        steps += [one for one in (getattr(step, "ex_iterable", None),) if one is not None]
        steps += getattr(step, "ex_iterables", [])
    return None


@dataclass(frozen=True, slots=True)
class _Part:
    """One shard of a Hugging Face IterableDataset."""

    dataset: Any
    index: int
    count: int

    def __call__(self) -> Any:
        if self.count == 1:
            return self.dataset
        return _in_epoch_of(self.dataset, self.dataset.shard(num_shards=self.count, index=self.index))


@dataclass(frozen=True, slots=True)
class _Rank:
    """A torch IterableDataset with the number of the part that it reads."""

    dataset: Any
    part: int
    parts: int

    def __call__(self) -> Any:
        own = copy.copy(self.dataset)
        own.data_rank, own.data_size = self.part, self.parts
        return own


@dataclass(frozen=True, slots=True)
class _Itself:
    """What is iterated again and again, as a function that returns it and that reaches spawned workers."""

    source: Any

    def __call__(self) -> Any:
        return self.source


def _skip(records: Any, rows: int) -> Any:
    """Pass over rows of a Hugging Face IterableDataset, without drawing them if possible."""
    return _in_epoch_of(records, records.skip(rows))


def _in_epoch_of(dataset: Any, part: Any) -> Any:
    """Give a part of a Hugging Face dataset the ``set_epoch`` of the whole, which skip() and shard() drop."""
    part.set_epoch(dataset.epoch)
    return part


def is_iterator(source: object) -> bool:
    """Return whether a source goes on where it was left whenever it is iterated: a generator, or a map."""
    if not hasattr(source, "__next__"):
        return False
    code = getattr(getattr(type(source), "__iter__", None), "__code__", None)
    return code is None or code.co_code == _SELF  # the __iter__ of others may set them back


_SELF = (lambda self: self).__code__.co_code


def _positional(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built-in functions have none
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]


def is_hf(source: object) -> bool:
    """Return whether a source is a Hugging Face ``IterableDataset``, without importing datasets."""
    return any(
        base.__name__ == "IterableDataset" and base.__module__.startswith("datasets.")
        for base in type(source).__mro__
    )
