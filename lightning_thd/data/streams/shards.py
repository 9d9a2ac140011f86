"""Sources of a stream -> shards: numbered records that can be read from any row on.

A source is a path or glob, a Hugging Face or torch ``IterableDataset``, an iterable, or a function that
begins an iterator. One that splits itself by rank is refused.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from types import CellType, FunctionType
from typing import Any, NamedTuple, Protocol

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import IterableDataset

from lightning_thd._imports import require
from lightning_thd.data.read.files import KINDS, PACKED, expand, suffix_of, unpacked
from lightning_thd.data.read.records import as_written, parse_line

_ROWS = 1024  # rows of a Parquet batch: some megabytes of tokens
_MARK_EVERY = 64  # rows between two states that are kept: a resumed source passes over fewer
_EMPTY = CellType()  # the cell of a name that was not bound yet
_FIRST = "the first record"
# Steps that a Hugging Face IterableDataset applies to each shard by itself when it is split.
_ACROSS = {
    "Skip": "skip()",
    "Take": "take()",
    "Step": "step()",
    "CyclingMultiSources": "interleave_datasets()",
    "RandomlyCyclingMultiSources": "interleave_datasets()",
}


# The number of a row, and the state of a source that gives this row next.
Mark = tuple[int, Any]
Rows = Iterator[tuple[int, Any, "Mark | None"]]


class Shard(Protocol):
    """Numbered records in an order that never changes."""

    @property
    def name(self) -> str:
        """Return the name of the shard, for messages."""
        ...

    @property
    def size(self) -> int:
        """Return the size of the shard, in bytes or any unit by which ranks share shards out."""
        ...

    def read(self, start: int, mark: Mark | None = None) -> Rows:
        """Yield row, record and mark from row ``start`` on; a record that cannot be read is a ``Bad``."""
        ...


class Shards(NamedTuple):
    """The shards of a stream, in the order given."""

    shards: Sequence[Shard]
    replays: bool  # whether reading again gives the same records for sure, as files do
    read_once: Mapping[str, Any]  # objects that one rank reads for all, by name


@dataclass(frozen=True, slots=True)
class LineShard:
    """A JSONL file, perhaps compressed, on a disk or wherever fsspec reaches."""

    name: str
    size: int

    def read(self, start: int, mark: Mark | None = None) -> Rows:
        """Parse the lines from row ``start`` on; blank lines are no rows."""
        row = 0
        suffix = Path(self.name.lower()).suffix
        with _open(self.name) as file:
            packed = suffix in PACKED
            for line in _lines(unpacked(file, self.name, suffix=suffix)) if packed else file:
                if line.strip():
                    if row >= start:
                        yield row, parse_line(line), None
                    row += 1


@dataclass(frozen=True, slots=True)
class ColumnShard:
    """A Parquet or Arrow file: one record a row."""

    name: str
    size: int

    def read(self, start: int, mark: Mark | None = None) -> Rows:
        """Read batches of rows; those before ``start`` are skipped without conversion."""
        row = 0
        for batch in self._batches():
            if row + batch.num_rows > start:
                first = max(0, start - row)
                for i, record in enumerate(batch.slice(first).to_pylist()):
                    yield row + first + i, as_written(record), None
            row += batch.num_rows

    def _batches(self) -> Iterator[Any]:
        arrow = require("pyarrow", feature=f"reading {self.name}")
        with _open(self.name) as file:
            if self.name.endswith(".parquet"):
                parquet = require("pyarrow.parquet", feature=f"reading {self.name}")
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


def file_shard(name: str) -> Shard:
    """Make the shard of a file by its suffix."""
    size = Path(name).stat().st_size if "://" not in name else 1
    kind, packed = KINDS.get(suffix_of(name)), Path(name.lower()).suffix in PACKED
    if kind == "JSONL":
        return LineShard(name, size)
    if kind == "column" and not packed:
        return ColumnShard(name, size)
    raise ValueError(
        f"{name} cannot be streamed. Shards are .jsonl files, which may be compressed ({', '.join(PACKED)}), "
        ".parquet and .arrow files; pass datasets.load_dataset(..., streaming=True) for others, tars too."
    )


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
    """The first state of a source that saves its position, and whether a reading of it was left.

    Such a source may go on where it was left, so that a new reading has to set it back.
    """

    def __init__(self, source: Any) -> None:
        self._state: Any = None
        self._left = False  # whether a reading began that has not come to its end
        with contextlib.suppress(Exception):  # some sources have a state only after their first record
            self._state = _copied(source.state_dict())

    @classmethod
    def of(cls, source: Any) -> Beginning:
        """Return what is known of a source in this process, however many loaders read it."""
        try:
            return _KNOWN.setdefault(source, cls(source))
        except TypeError:  # the source is not hashable, or allows no weak reference
            return cls(source)

    def read(self, source: Any, mark: Mark | None = None) -> Iterator[tuple[Any, Mark | None]]:
        """Yield records from the first or a saved state on; each ``_MARK_EVERY``-th brings a new state."""
        first, state = (0, self._state if self._left else None) if mark is None else mark
        self._left = True
        if state is not None:
            source.load_state_dict(_copied(state))
        for row, record in enumerate(source, first + 1):
            yield record, (row, _copied(source.state_dict())) if row % _MARK_EVERY == 0 else None
        self._left = False


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
            begun = (self.beginning or Beginning.of(records)).read(records, mark)
            for row, (record, place) in enumerate(begun, 0 if mark is None else mark[0]):
                if row >= start:
                    yield row, record, place
        else:
            self._refuse_a_second_time(records)
            for row, record in islice(enumerate(records), start, None):
                yield row, record, None

    def _refuse_a_second_time(self, records: Any) -> None:
        """Refuse an iterator that was read before: its next records would be taken for the first rows."""
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
        return [
            IterableShard(f"{kind} shard {i}", 1, partial(_part, source, i, count), _skip)
            for i in range(count)
        ]
    if isinstance(source, IterableDataset) and hasattr(source, "data_rank") and hasattr(source, "data_size"):
        return [
            IterableShard(f"{kind} part {i}", 1, partial(_of_rank, source, i, parts)) for i in range(parts)
        ]
    if isinstance(source, IterableDataset) or (hasattr(source, "__iter__") and not callable(source)):
        read_once[kind] = source
        if has_state(source):
            beginning = Beginning.of(source)  # goes with it into worker processes
            return [IterableShard(kind, 1, partial(_itself, source), beginning=beginning)]
        return [IterableShard(kind, 1, partial(_itself, source), drawn=_Drawn(travels=True))]
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


def _itself(source: Any) -> Any:
    return source


def _part(dataset: Any, index: int, count: int) -> Any:
    """Return one shard of a Hugging Face IterableDataset."""
    if count == 1:
        return dataset
    return _in_epoch_of(dataset, dataset.shard(num_shards=count, index=index))


def _of_rank(dataset: Any, part: int, parts: int) -> Any:
    """Return a copy of a torch IterableDataset that reads one of its parts."""
    own = copy.copy(dataset)
    own.data_rank, own.data_size = part, parts
    return own


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


def is_stream(source: object) -> bool:
    """Return whether a source can only be iterated: a dataset, a generator, a function that begins one."""
    if isinstance(source, str | Path):
        return False
    if isinstance(source, IterableDataset) or is_hf(source) or inspect.isgenerator(source):
        return True
    if isinstance(source, list | tuple):
        return bool(source) and all(map(is_stream, source))
    sized = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    return not sized and (callable(source) or hasattr(source, "__iter__"))


def open_shards(source: Any, *, parts: int) -> Shards:
    """Split a source into shards."""
    sources = source if isinstance(source, list | tuple) else [source]
    found: list[Shard] = []
    read_once: dict[str, Any] = {}
    replays = True
    for number, one in enumerate(sources):
        if isinstance(one, str | Path):
            found += [file_shard(name) for name in expand(one)]
            continue
        replays &= is_hf(one)
        found += iterable_shards(
            one, parts, prefix=f"{number}/" if len(sources) > 1 else "", read_once=read_once
        )
    if not found:
        raise ValueError("The stream has no shards: its source is an empty list. Pass at least one path.")
    return Shards(found, replays, read_once)


def traits(source: Any, *, first: bool = False) -> dict[str, Any]:
    """Collect what must be the same on all ranks: plain values of a source, and its first record."""
    held: dict[str, Any] = dict(getattr(source, "__dict__", {}))
    if isinstance(source, FunctionType):
        cells = zip(source.__code__.co_freevars, source.__closure__ or (), strict=True)
        held |= {name: cell.cell_contents for name, cell in cells if cell != _EMPTY}
    elif isinstance(source, partial):
        held |= {f"argument {i}": value for i, value in enumerate(source.args)} | source.keywords
    found = {
        name: value
        for name, value in held.items()
        if "device" not in name
        and all(map(_is_plain, value if isinstance(value, list | tuple | range) else [value]))
    }
    if first and not is_iterator(source):
        with contextlib.suppress(Exception):  # reading raises it again, with its place
            found[_FIRST] = _first_record(source)
    return found


def _first_record(source: Any) -> str | None:
    """Return a hash of the first record; None for a source that cannot be begun more than once."""
    if callable(source) and not isinstance(source, IterableDataset):
        source, other = source(), source()
        if source is other and is_iterator(source):
            return None
    if has_state(source):
        records: Any = (record for record, _ in Beginning.of(source).read(source))
    elif (records := iter(source)) is iter(source):
        return None
    return hashlib.sha256(content_of(next(records, None))).hexdigest()[:12]


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | str)


def refuse_split(read_once: Mapping[str, Any], of_ranks: list[dict[str, dict[str, Any]]]) -> None:
    """Refuse sources that one rank reads for all and that differ between ranks."""
    for name in read_once:
        first = of_ranks[0].get(name, {})
        for rank, found in enumerate(of_ranks):
            for key, value in found.get(name, {}).items():
                if key not in first or first[key] == value:
                    continue
                split = (
                    f"has another first record on rank {rank} than on rank 0, so it splits itself by rank, "
                    "or draws without a seed."
                    if key == _FIRST
                    else f"holds {key}={first[key]!r:.60} on rank 0 and {value!r:.60} on rank {rank}, so "
                    "it was split by rank."
                )
                raise ValueError(
                    f"{name} {split} One rank reads it for all, and would give only its own part. Pass a "
                    "function make(part, parts) that begins one part, or give the dataset the attributes "
                    "data_rank and data_size; if it gives every record, make it the same on all ranks."
                )
