"""Paths, iterable datasets or generators -> shards: numbered records that can be read from any row on."""

from __future__ import annotations

import copy
import glob
import inspect
import io
import json
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch.utils.data import IterableDataset

from lightning_thd._imports import require

_LINES = (".jsonl", ".ndjson")
_PACKED = (".gz", ".zst")
_COLUMNS = (".parquet", ".arrow")
_ROWS = 1024  # rows of a parquet batch: some megabytes of tokens


@dataclass(frozen=True, slots=True)
class Bad:
    """A record that cannot be read.

    Attributes:
        reason: what is wrong with it.
    """

    reason: str


class Shard(Protocol):
    """Records in an order that never changes, numbered from 0.

    Attributes:
        name: for messages.
        size: bytes, or any number that compares shards; ranks share shards out by it.
    """

    @property
    def name(self) -> str:
        """Return what the shard is called."""
        ...

    @property
    def size(self) -> int:
        """Return how large the shard is."""
        ...

    def read(self, start: int) -> Iterator[tuple[int, Any]]:
        """Yield row and record from row ``start`` on; a record that cannot be read is a ``Bad``."""
        ...


@dataclass(frozen=True, slots=True)
class LineShard:
    """A JSONL file, ``.gz`` and ``.zst`` included, on a disk or wherever fsspec reaches."""

    name: str
    size: int

    def read(self, start: int) -> Iterator[tuple[int, Any]]:
        """Parse the lines from row ``start`` on; blank lines are no rows."""
        row = 0
        with _open(self.name) as file:
            for line in file:
                if not line.strip():
                    continue
                if row >= start:
                    yield row, _parse(line)
                row += 1


@dataclass(frozen=True, slots=True)
class ColumnShard:
    """A parquet or arrow file: one record a row."""

    name: str
    size: int

    def read(self, start: int) -> Iterator[tuple[int, Any]]:
        """Read batches of rows; those before ``start`` are skipped without conversion."""
        row = 0
        for batch in self._batches():
            if row + batch.num_rows > start:
                first = max(0, start - row)
                for i, record in enumerate(batch.slice(first).to_pylist()):
                    yield row + first + i, record
            row += batch.num_rows

    def _batches(self) -> Iterator[Any]:
        with _open(self.name) as file:
            if self.name.endswith(".parquet"):
                require("pyarrow", feature=f"reading {self.name}")
                from pyarrow import parquet

                yield from parquet.ParquetFile(file).iter_batches(batch_size=_ROWS)
                return
            arrow = require("pyarrow", feature=f"reading {self.name}")
            try:
                reader = arrow.ipc.open_file(file)
            except arrow.ArrowInvalid:
                file.seek(0)
                yield from arrow.ipc.open_stream(file)
                return
            for i in range(reader.num_record_batches):
                yield reader.get_batch(i)


@dataclass(frozen=True, slots=True)
class TarShard:
    """A WebDataset tar: files that share a name up to its first dot are one record.

    ``x.json`` is merged into the record, ``x.txt`` becomes ``text``, and ``x.KEY.npy`` becomes ``KEY``.
    """

    name: str
    size: int

    def read(self, start: int) -> Iterator[tuple[int, Any]]:
        """Read the members one after another; a record ends where the name changes."""
        with _open(self.name) as file, tarfile.open(fileobj=file, mode="r|*") as tar:
            row, key = 0, None
            record: Any = {}
            for member in tar:
                if not member.isfile():
                    continue
                stem, _, kind = member.name.partition(".")
                if key is not None and stem != key:
                    if row >= start:
                        yield row, record
                    row, record = row + 1, {}
                key = stem
                content = tar.extractfile(member)
                if row >= start and content is not None:
                    record = _merged(record, kind, content.read())
            if key is not None and row >= start:
                yield row, record


@dataclass(frozen=True, slots=True)
class IterableShard:
    """What a function gives when it is called: an iterator over records.

    Rows before ``start`` are drawn and thrown away, unless ``skip`` says how to pass over them.
    """

    name: str
    size: int
    begin: Callable[[], Iterable[Any]]
    skip: Callable[[Any, int], Iterable[Any]] | None = None

    def read(self, start: int) -> Iterator[tuple[int, Any]]:
        """Begin anew and pass over the first ``start`` records."""
        records = self.begin()
        if start and self.skip is not None:
            yield from enumerate(self.skip(records, start), start)
        else:
            yield from islice(enumerate(records), start, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """The shards of a stream.

    Attributes:
        shards: in the order given.
        replays: whether reading again gives the same records for sure, as files do.
    """

    shards: Sequence[Shard]
    replays: bool


def is_stream(source: object) -> bool:
    """Say whether a source can only be iterated: iterable datasets, generators and their factories, tars."""
    if isinstance(source, str | Path):
        return str(source).endswith((".tar", ".tar.gz", ".tgz"))
    if isinstance(source, IterableDataset) or _is_hf(source) or inspect.isgenerator(source):
        return True
    if isinstance(source, list | tuple):
        return bool(source) and all(map(is_stream, source))
    sized = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    return not sized and (callable(source) or hasattr(source, "__iter__"))


def open_shards(source: Any, *, parts: int) -> Shards:
    """Take a source apart into shards.

    Args:
        source: paths and globs of ``.jsonl[.gz|.zst]``, ``.parquet``, ``.arrow`` and ``.tar`` files, in a
            list or alone, local or through fsspec; a Hugging Face or torch ``IterableDataset``; a function
            that begins an iterator, ``factory()`` or ``factory(part, parts)``; a list of such.
        parts: parts that a torch dataset with the attributes ``data_rank`` and ``data_size``, or a function
            of two arguments, is asked for.

    Raises:
        ValueError: for what is none of these, and for paths that do not exist.
    """
    sources = source if isinstance(source, list | tuple) else [source]
    found: list[Shard] = []
    replays = True
    for number, one in enumerate(sources):
        if isinstance(one, str | Path):
            found += [_file_shard(name) for name in _expanded(str(one))]
            continue
        replays &= _is_hf(one)
        found += _iterable_shards(one, parts, prefix=f"{number}/" if len(sources) > 1 else "")
    if not found:
        raise ValueError("The stream has no shards: an empty list was passed. Pass at least one.")
    return Shards(shards=found, replays=replays)


def _iterable_shards(source: Any, parts: int, *, prefix: str) -> Sequence[Shard]:
    kind = f"{prefix}{type(source).__name__}"
    if _is_hf(source):
        count = int(source.num_shards)
        return [
            IterableShard(f"{kind} shard {i}", 1, _Part(source, i, count), lambda records, n: records.skip(n))
            for i in range(count)
        ]
    if isinstance(source, IterableDataset) and hasattr(source, "data_rank") and hasattr(source, "data_size"):
        return [IterableShard(f"{kind} part {i}", 1, _Rank(source, i, parts)) for i in range(parts)]
    if isinstance(source, IterableDataset) or (hasattr(source, "__iter__") and not callable(source)):
        return [IterableShard(kind, 1, _Once(source) if inspect.isgenerator(source) else lambda: source)]
    if not callable(source):
        raise ValueError(
            f"{type(source).__name__} is no stream. Pass paths, an IterableDataset, or a function that "
            "returns an iterator over {'input_ids': ...}."
        )
    name = prefix + getattr(source, "__name__", type(source).__name__)
    if len(_positional(source)) == 2:
        return [IterableShard(f"{name} part {i}", 1, lambda i=i: source(i, parts)) for i in range(parts)]  # type: ignore[misc]
    return [IterableShard(name, 1, source)]


@dataclass(frozen=True, slots=True)
class _Part:
    """One shard of a Hugging Face IterableDataset."""

    dataset: Any
    index: int
    count: int

    def __call__(self) -> Any:
        if self.count == 1:
            return self.dataset
        return self.dataset.shard(num_shards=self.count, index=self.index)


@dataclass(frozen=True, slots=True)
class _Rank:
    """A torch IterableDataset that is told which part to read."""

    dataset: Any
    part: int
    parts: int

    def __call__(self) -> Any:
        own = copy.copy(self.dataset)
        own.data_rank, own.data_size = self.part, self.parts
        return own


class _Once:
    """A generator object, which can be read one time."""

    def __init__(self, generator: Iterator[Any]) -> None:
        self._generator: Iterator[Any] | None = generator

    def __call__(self) -> Iterator[Any]:
        generator, self._generator = self._generator, None
        if generator is None:
            raise ValueError(
                "A generator object can be read one time, and it was. Pass the function that makes it in its "
                "place: THDDataModule(train=make_records, ...)."
            )
        return generator


def _positional(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built-in functions have none
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]


def _is_hf(source: object) -> bool:
    return any(
        base.__name__ == "IterableDataset" and base.__module__.startswith("datasets.")
        for base in type(source).__mro__
    )


def _file_shard(name: str) -> Shard:
    size = Path(name).stat().st_size if "://" not in name else 1
    plain = name.removesuffix(".gz").removesuffix(".zst")
    if plain.endswith(_LINES):
        return LineShard(name, size)
    if name.endswith(_COLUMNS):
        return ColumnShard(name, size)
    if plain.endswith(".tar") or name.endswith(".tgz"):
        return TarShard(name, size)
    raise ValueError(
        f"{name} cannot be streamed. Shards are .jsonl[.gz|.zst], .parquet, .arrow and .tar files."
    )


def _expanded(path: str) -> list[str]:
    if "://" in path:
        fsspec = require("fsspec", feature=f"reading {path}")
        if not any(c in path for c in "*?["):
            return [path]
        system, inside = fsspec.core.url_to_fs(path)
        names = sorted(system.unstrip_protocol(name) for name in system.glob(inside))
    else:
        names = sorted(glob.glob(path, recursive=True)) if any(c in path for c in "*?[") else [path]
        if names == [path] and Path(path).is_dir():
            names = sorted(str(file) for file in Path(path).rglob("*") if file.is_file())
        names = [name for name in names if Path(name).is_file()]
    if not names:
        raise ValueError(f"No file is found for {path!r}. Pass paths or globs of files that exist.")
    return names


def _open(name: str) -> Any:
    if "://" in name or name.endswith(_PACKED):
        fsspec = require("fsspec", feature=f"reading {name}")
        compression = {".gz": "gzip", ".zst": "zstd"}.get(Path(name).suffix)
        if name.endswith(".tar.gz"):
            compression = None  # tarfile unpacks it
        file = fsspec.open(name, "rb", compression=compression).open()
        return io.BufferedReader(file) if compression == "zstd" else file  # it cannot iterate over lines
    return Path(name).open("rb")


def _parse(line: bytes) -> Any:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as err:
        return Bad(f"not JSON ({err})")
    return record if isinstance(record, dict) else Bad(f"a {type(record).__name__}, wanted a JSON object")


def _merged(record: Any, kind: str, content: bytes) -> Any:
    """Add one file of a tar to its record."""
    if isinstance(record, Bad):
        return record
    if kind == "json":
        found = _parse(content)
        return found if isinstance(found, Bad) else {**record, **found}
    if kind in ("txt", "text"):
        return {**record, "text": content.decode(errors="replace")}
    if kind.endswith("npy"):
        key = kind.removesuffix("npy").rstrip(".") or "input_ids"
        try:
            return {**record, key: np.load(io.BytesIO(content), allow_pickle=False)}
        except ValueError as err:
            return Bad(f"{kind} is no array ({err})")
    return record  # other files belong to other readers
