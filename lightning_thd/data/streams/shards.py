"""Sources of a stream -> shards, which are files or parts with numbered records, to be read from any row on.

A source is a path or glob, an ``IterableDataset``, an iterable, or a function that returns an iterator.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import IterableDataset

from lightning_thd._imports import require
from lightning_thd.data.read.files import KINDS, PACKED, expand, suffix_of, unpacked
from lightning_thd.data.read.records import as_written, parse_line

_ROWS = 1024  # rows of a Parquet batch: some megabytes of tokens
_MARK_EVERY = 64  # rows between two saved states; a resumed source skips fewer rows than this
_COMPARED = 4  # first records that must be the same on all ranks
# Operations that a split Hugging Face IterableDataset would apply to each shard separately.
_ACROSS = {
    "Skip": "skip()",
    "Take": "take()",
    "Step": "step()",
    "CyclingMultiSources": "interleave_datasets()",
    "RandomlyCyclingMultiSources": "interleave_datasets()",
}

Mark = tuple[int, Any]  # The number of a row, and the state of a source that gives this row next.
Rows = Iterator[tuple[int, Any, Mark | None]]


@dataclass(frozen=True, slots=True)
class FileShard:
    """A JSONL, Parquet or Arrow file of records, local or through fsspec."""

    name: str
    size: int  # bytes; ranks divide the shards by size
    replays = True
    whole = False

    def read(self, start: int, mark: Mark | None = None) -> Rows:
        """Yield (row, record, mark) from a row on; a record may be ``Bad``, and blank lines do not count."""
        with _open(self.name) as file:
            if KINDS[suffix_of(self.name)] == "JSONL":
                suffix = Path(self.name.lower()).suffix
                packed = suffix in PACKED
                lines = _lines(unpacked(file, self.name, suffix=suffix)) if packed else file
                filled = (line for line in lines if line.strip())
                for row, line in islice(enumerate(filled), start, None):
                    yield row, parse_line(line), None
                return
            row = 0
            for batch in _batches(file, self.name):
                first = max(0, start - row)
                for i, record in enumerate(batch.slice(min(first, batch.num_rows)).to_pylist(), row + first):
                    yield i, as_written(record), None
                row += batch.num_rows


def file_shard(name: str) -> FileShard:
    """Make the shard of a file, or refuse its suffix."""
    kind, packed = KINDS.get(suffix_of(name)), Path(name.lower()).suffix in PACKED
    if kind == "JSONL" or (kind == "column" and not packed):
        return FileShard(name, Path(name).stat().st_size if "://" not in name else 1)
    raise ValueError(
        f"{name} cannot be streamed. Shards are .jsonl files, perhaps compressed, .parquet and .arrow files; "
        "pass datasets.load_dataset(..., streaming=True) for others."
    )


def _batches(file: Any, name: str) -> Iterator[Any]:
    """Read a Parquet or Arrow file in batches of rows."""
    arrow = require("pyarrow", feature=f"reading {name}")
    if suffix_of(name) == ".parquet":
        parquet = require("pyarrow.parquet", feature=f"reading {name}")
        yield from parquet.ParquetFile(file).iter_batches(batch_size=_ROWS)
        return
    try:
        reader = arrow.ipc.open_file(file)
    except arrow.ArrowInvalid:
        file.seek(0)
        yield from arrow.ipc.open_stream(file)
        return
    for i in range(reader.num_record_batches):
        yield reader.get_batch(i)


def _open(name: str) -> Any:
    if "://" in name:
        return require("fsspec", feature=f"reading {name}").open(name, "rb").open()
    return Path(name).open("rb")


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Split blocks of bytes into lines."""
    begun: list[bytes] = []  # the parts of a line that spans blocks
    for block in blocks:
        first, *others = block.split(b"\n")
        begun.append(first)
        for other in others:
            yield b"".join(begun)
            begun = [other]
    yield b"".join(begun)


class Beginning:
    """The first state of a source that saves its position, and whether its last iteration was unfinished.

    Such a source may continue where it was left, so a new iteration must reset it.
    """

    def __init__(self, source: Any) -> None:
        self._state: Any = None
        self._left = False  # whether an iteration began and has not finished
        with contextlib.suppress(Exception):  # some sources have a state only after their first record
            self._state = copy.deepcopy(source.state_dict())

    @classmethod
    def of(cls, source: Any) -> Beginning:
        """Return the one object for a source in this process, however many loaders read it."""
        try:
            return _KNOWN.setdefault(source, cls(source))
        except TypeError:  # the source is not hashable, or allows no weak reference
            return cls(source)

    def read(self, source: Any, mark: Mark | None = None) -> Iterator[tuple[Any, Mark | None]]:
        """Yield records from the start or a saved state on, every ``_MARK_EVERY``-th with a new state."""
        first, state = (0, self._state if self._left else None) if mark is None else mark
        self._left = True
        if state is not None:
            source.load_state_dict(copy.deepcopy(state))
        for row, record in enumerate(source, first + 1):
            yield record, (row, copy.deepcopy(source.state_dict())) if row % _MARK_EVERY == 0 else None
        self._left = False


_KNOWN: weakref.WeakKeyDictionary[Any, Beginning] = weakref.WeakKeyDictionary()


def has_state(source: object) -> bool:
    """Return whether a source can save and restore its position."""
    return all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict"))


@dataclass(frozen=True, slots=True)
class IterableShard:
    """A shard whose records come from calling a function that returns an iterator."""

    name: str
    begin: Callable[[], Iterable[Any]]
    size: int = 1
    replays: bool = False  # Reading again gives the same records for sure.
    whole: bool = False  # One rank reads it for all, so it must not split itself.
    beginning: Beginning | None = field(default=None, compare=False, repr=False)

    def read(self, start: int, mark: Mark | None = None) -> Rows:
        """Yield the records from row ``start`` on, from the first record or a saved state."""
        records, first = self.begin(), 0
        if has_state(records) and not is_hf(records):  # its shuffle buffers would lose their records
            given = (self.beginning or Beginning.of(records)).read(records, mark)
            first = 0 if mark is None else mark[0]
        else:
            self._refuse_a_second_time(records)
            given = ((record, None) for record in records)
        for row, (record, place) in islice(enumerate(given, first), start - first, None):
            yield row, as_written(record), place

    def _refuse_a_second_time(self, records: Any) -> None:
        """Refuse an iterator that was read before, because its next record would count as row 0."""
        if inspect.isgenerator(records):
            begun = inspect.getgeneratorstate(records) != inspect.GEN_CREATED
        else:
            begun = hasattr(records, "__next__") and records is self.begin()
        if begun:
            raise ValueError(
                f"A {type(records).__name__} can be read one time, and it was. Pass its function."
            )


Shard = FileShard | IterableShard


def iterable_shards(source: Any, parts: int, *, prefix: str) -> list[IterableShard]:
    """Split a source that is not a path into shards."""
    kind = f"{prefix}{type(source).__name__}"
    if isinstance(source, Mapping):  # iterating over one sample would read its keys as texts
        raise ValueError(f"{kind} is not a stream. Give samples by a function that returns an iterator.")
    if is_hf(source):
        if getattr(source, "_distributed", None) is not None:
            raise ValueError(f"{kind} was split by rank (split_dataset_by_node). Pass the whole dataset.")
        count = int(source.num_shards)
        if count > 1 and (why := _counts_across_shards(source)) is not None:
            rank_zero_warn(
                f"{kind} has {why}, which counts rows over all its {count} shards. One process reads it, "
                "front to back. To read shards side by side, use filter(), and a mixture of THDDataModule."
            )
            count = 1
        begins = [partial(_part, source, i, count) for i in range(count)]
        return [IterableShard(f"{kind} shard {i}", begin, replays=True) for i, begin in enumerate(begins)]
    if isinstance(source, IterableDataset) or (hasattr(source, "__iter__") and not callable(source)):
        # Made here, so that worker processes get it with the shard.
        beginning = Beginning.of(source) if has_state(source) else None
        return [IterableShard(kind, partial(_part, source, 0, 1), whole=True, beginning=beginning)]
    if not callable(source):
        raise ValueError(f"{type(source).__name__} is not a stream. Pass paths, a dataset, or a function.")
    name = prefix + getattr(source, "__name__", type(source).__name__)
    if len(_positional(source)) == 2:
        return [IterableShard(f"{name} part {i}", partial(source, i, parts)) for i in range(parts)]
    return [IterableShard(name, source, whole=True)]


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


def _part(dataset: Any, index: int, count: int) -> Any:
    """Return one shard of a Hugging Face IterableDataset in the same epoch; if ``count`` is 1, the source."""
    if count == 1:
        return dataset
    part = dataset.shard(num_shards=count, index=index)
    part.set_epoch(dataset.epoch)
    return part


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


def is_stream(source: object) -> bool:
    """Return whether a source can only be iterated: a dataset, a generator, or a function that makes one."""
    if isinstance(source, str | Path):
        return False
    if isinstance(source, IterableDataset) or is_hf(source) or inspect.isgenerator(source):
        return True
    if isinstance(source, list | tuple):
        return bool(source) and all(map(is_stream, source))
    sized = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    return not sized and (callable(source) or hasattr(source, "__iter__"))


def open_shards(source: Any, *, parts: int) -> list[Shard]:
    """Split a source into shards."""
    sources = source if isinstance(source, list | tuple) else [source]
    found: list[Shard] = []
    for number, one in enumerate(sources):
        if isinstance(one, str | Path):
            found += [file_shard(name) for name in expand(one)]
        else:
            found += iterable_shards(one, parts, prefix=f"{number}/" if len(sources) > 1 else "")
    if not found:
        raise ValueError("The stream has no shards: its source is an empty list. Pass at least one path.")
    return found


def first_records(shard: Shard) -> str | None:
    """Return a hash of the first records, which all ranks must share; None if they cannot be read."""
    with contextlib.suppress(Exception):  # the stream raises the error again, with its row
        found = [record for _, record, _ in islice(shard.read(0), _COMPARED)]
        return hashlib.sha256(pickle.dumps(found)).hexdigest()
    return None
