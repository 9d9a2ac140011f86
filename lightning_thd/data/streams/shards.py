"""Sources of a stream -> shards: files or parts whose numbered records can be read from any row on."""

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
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_thd._imports import require
from lightning_thd._private import private_of
from lightning_thd.data.read.files import (
    KINDS,
    PACKED,
    expand,
    is_blank,
    name_blank,
    refuse_all_blank,
    suffix_of,
    unpacked,
    without_query,
)
from lightning_thd.data.read.records import as_written, parse_line
from lightning_thd.warnings import SlowWarning, warn

_ROWS = 1024  # rows of a Parquet batch: some megabytes of tokens
_MARK_EVERY = 64  # rows between two saved states; to resume at a row, fewer rows than this are read before it
_COMPARED = 4  # first records of a source without parts, which must be the same on all ranks
# Operations of a Hugging Face IterableDataset that count rows over all shards; a split would change them.
_ACROSS = {
    "Skip": "skip()",
    "Take": "take()",
    "Step": "step()",
    "CyclingMultiSources": "interleave_datasets()",
    "RandomlyCyclingMultiSources": "interleave_datasets()",
}

Mark = tuple[int, Any]  # the number of a row, and a saved state of the source from which this row comes next
Rows = Iterator[tuple[int, Any, Mark | None]]  # row, record, and a mark of this row if one was saved


@dataclass(frozen=True, slots=True)
class FileShard:
    """A JSONL, Parquet or Arrow file of records, local or through fsspec."""

    name: str
    size: int  # bytes, 1 if remote; ranks divide the shards by size
    replays = True
    whole = False

    @property
    def folder(self) -> Path | None:
        """Return the folder at which relative paths of images start; None for a remote file."""
        return None if "://" in self.name else Path(self.name).parent

    def read(self, start: int, mark: Mark | None = None, *, epoch: int = 0) -> Rows:
        """Yield the records from a row on; a record may be ``Bad``, and blank lines are no rows."""
        with _open(self.name) as file:
            if KINDS[suffix_of(self.name)] == "JSONL":
                yield from self._read_lines(file, start)
            else:
                yield from self._read_columns(file, start)

    def is_blank(self) -> bool:
        """Return whether a local file of lines has none; other files are not looked into."""
        if "://" in self.name or KINDS[suffix_of(self.name)] != "JSONL":
            return False
        suffix = Path(self.name.lower()).suffix
        if suffix not in PACKED:
            return is_blank(Path(self.name))
        with contextlib.suppress(Exception), _open(self.name) as file:  # reading will raise the error again
            return not any(block.strip() for block in unpacked(file, self.name, suffix=suffix))
        return False

    def _read_lines(self, file: Any, start: int) -> Rows:
        suffix = Path(self.name.lower()).suffix
        lines = _lines(unpacked(file, self.name, suffix=suffix)) if suffix in PACKED else file
        filled = (line for line in lines if line.strip())
        for row, line in islice(enumerate(filled), start, None):
            yield row, parse_line(line), None

    def _read_columns(self, file: Any, start: int) -> Rows:
        first_row = 0  # where the batch begins
        for batch in _batches(file, self.name):
            skipped = max(0, start - first_row)
            records = batch.slice(min(skipped, batch.num_rows)).to_pylist()
            for row, record in enumerate(records, first_row + skipped):
                yield row, as_written(record), None
            first_row += batch.num_rows


def file_shard(name: str) -> FileShard:
    """Make the shard of a file; raise if files with this suffix cannot be streamed."""
    kind = KINDS.get(suffix_of(name))
    is_packed = Path(without_query(name).lower()).suffix in PACKED
    if kind == "JSONL" or (kind == "column" and not is_packed):
        is_remote = "://" in name
        return FileShard(name, 1 if is_remote else Path(name).stat().st_size)
    raise ValueError(
        f"{name} cannot be streamed. Pass .jsonl files (also compressed), .parquet or .arrow files, or "
        "datasets.load_dataset(..., streaming=True)."
    )


def _batches(file: Any, name: str) -> Iterator[Any]:
    arrow = require("pyarrow", feature=f"reading {name}")
    if suffix_of(name) == ".parquet":
        parquet = require("pyarrow.parquet", feature=f"reading {name}")
        yield from parquet.ParquetFile(file).iter_batches(batch_size=_ROWS)
        return
    try:
        reader = arrow.ipc.open_file(file)
    except arrow.ArrowInvalid:  # the file is in the stream format, which datasets writes
        file.seek(0)
        yield from arrow.ipc.open_stream(file)
        return
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


def _open(name: str) -> Any:
    if "://" in name:
        return require("fsspec", feature=f"reading {name}").open(name, "rb").open()
    return Path(name).open("rb")


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Cut blocks of bytes into lines, without their ends."""
    begun: list[bytes] = []  # the parts of a line that spans blocks
    for block in blocks:
        first, *others = block.split(b"\n")
        begun.append(first)
        for other in others:
            yield b"".join(begun)
            begun = [other]
    yield b"".join(begun)


class Beginning:
    """The first state of a source with ``state_dict``, and whether the source was read in this process.

    A source that was read may go on where it stopped. So it is reset to its first state for a new run.
    """

    def __init__(self, source: Any) -> None:
        self._state: Any = None  # the first state
        self.ended: Any = None  # the state after the last complete pass, with which the next begins
        # Without a first state, the first record and the state after it: the start cannot be read again.
        self._first_record: tuple[Any, Any] | None = None
        self._was_read = False
        with contextlib.suppress(Exception):  # some sources have a state only after their first record
            self._state = copy.deepcopy(source.state_dict())

    @classmethod
    def of(cls, source: Any) -> Beginning:
        """Return the ``Beginning`` of a source, the same for all loaders of this process."""
        try:
            return _BEGINNINGS.setdefault(source, cls(source))
        except TypeError:  # the source is not hashable, or allows no weak reference
            return cls(source)

    def read(
        self, source: Any, mark: Mark | None = None, *, epoch: int = 0
    ) -> Iterator[tuple[Any, Mark | None]]:
        """Yield (record, mark) from the start or a saved state on; the first and every 64th have marks."""
        first = 0  # the row that comes next from the source
        state: Any = None  # the state to load
        saved: Mark | None = None  # the mark of the next record
        if mark is not None:
            first, state = mark
        elif self._first_record is not None:
            record, state = self._first_record
            yield record, None
            first = 1
        elif self._state is not None:
            state = self._state if self._was_read else None
            saved = (0, self._state)

        self._was_read = True
        # A state inside a pass is loaded last, because set_epoch may begin a pass. A state at the start is
        # loaded first, because it may hold the epoch of the pass before.
        if first > 0:
            _set_epoch(source, epoch)
        if state is not None:
            # Copied, because a source may go on with the very object, and change it.
            source.load_state_dict(copy.deepcopy(state))
        if first == 0:
            _set_epoch(source, epoch)
        # From a state saved at the end of a pass, the first iteration may give nothing.
        iterations = 2 if state is not None and first == 0 else 1
        for _ in range(iterations):
            count = first  # records that were read
            for count, record in enumerate(source, first + 1):
                if state is None and count == 1 and self._state is None:
                    self._first_record = record, copy.deepcopy(source.state_dict())
                yield record, saved
                # A state is saved only before another record: the last may belong to the next pass already.
                saved = (count, copy.deepcopy(source.state_dict())) if count % _MARK_EVERY == 0 else None
            if count > first:
                break
        with contextlib.suppress(Exception):
            self.ended = copy.deepcopy(source.state_dict())


_BEGINNINGS: weakref.WeakKeyDictionary[Any, Beginning] = weakref.WeakKeyDictionary()


def _set_epoch(source: Any, epoch: int) -> None:
    """Tell a source, or the dataset of a loader, the number of the pass that begins, if it asks for that."""
    if isinstance(source, DataLoader):
        source = source.dataset
    set_epoch = getattr(source, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def has_state(source: object) -> bool:
    """Return whether a source can save and restore its position."""
    return all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict"))


@dataclass(frozen=True, slots=True)
class IterableShard:
    """A shard whose records come from an iterator that the function ``begin`` returns."""

    name: str
    begin: Callable[[], Iterable[Any]]
    size: int = 1
    replays: bool = False  # whether reading again surely gives the same records
    whole: bool = False  # whether this is the whole source, which one rank reads for all ranks
    beginning: Beginning | None = field(default=None, compare=False, repr=False)

    def read(self, start: int, mark: Mark | None = None, *, epoch: int = 0) -> Rows:
        """Yield the records from row ``start`` on; the source is read from its start or a saved state.

        Args:
            start: the first row to yield.
            mark: a saved state of the source at this row or before it.
            epoch: the number of the pass, which a source with ``set_epoch`` gets.
        """
        records: Any = self.begin()
        first = 0
        # States of Hugging Face datasets are not used: they lose the records in shuffle buffers.
        if has_state(records) and not is_hf(records):
            beginning = self.beginning or Beginning.of(records)
            marked = beginning.read(records, mark, epoch=epoch)
            if mark is not None:
                first = mark[0]
        else:
            self._refuse_begun(records)
            # The passes of a Hugging Face dataset count from the epoch that the user set.
            _set_epoch(records, epoch + int(records.epoch) if is_hf(records) else epoch)
            marked = ((record, None) for record in records)

        for row, (record, saved) in islice(enumerate(marked, first), start - first, None):
            yield row, as_written(record, getattr(records, "features", None)), saved

    def _refuse_begun(self, records: Any) -> None:
        """Refuse a generator that was read before, and an iterator that ``begin`` would return again."""
        is_new = inspect.isgenerator(records) and inspect.getgeneratorstate(records) == inspect.GEN_CREATED
        if not is_new and hasattr(records, "__next__") and records is self.begin():
            raise MisconfigurationException(  # not a fault of a record, which on_error="skip" would leave out
                f"A {type(records).__name__} can be read only once. Pass a function that makes a new one."
            )


Shard = FileShard | IterableShard


def iterable_shards(source: Any, parts: int, *, prefix: str) -> list[IterableShard]:
    """Return the shards of a source that is not a path.

    Args:
        source: an iterable, or a function that returns one.
        parts: the number of shards of a function ``make(part, parts)``.
        prefix: begins the names of the shards.

    Raises:
        ValueError: the source is not a stream of samples, or was split by rank already.
    """
    kind = f"{prefix}{type(source).__name__}"
    if isinstance(source, Mapping):  # iteration over a sample would give its keys as texts
        raise ValueError(f"{kind} is not a stream. Pass a list of samples without Stream(), or a function.")
    if isinstance(source, DataLoader) and source.batch_sampler is not None:
        raise ValueError(f"{kind} gives batches, and packs are made of samples. Pass its dataset instead.")

    if is_hf(source):
        return _hf_shards(source, kind)

    if isinstance(source, IterableDataset) or (hasattr(source, "__iter__") and not callable(source)):
        # The beginning is a part of the shard, so that worker processes get it too.
        beginning = Beginning.of(source) if has_state(source) else None
        shard = IterableShard(
            kind,
            partial(_part, source, 0, 1),
            replays=beginning is not None,
            whole=True,
            beginning=beginning,
        )
        return [shard]

    if not callable(source):
        raise ValueError(f"{type(source).__name__} is not a stream. Pass paths, a dataset, or a function.")
    name = prefix + getattr(source, "__name__", type(source).__name__)
    takes_part = len(_positional(source)) == 2
    if takes_part:
        return [IterableShard(f"{name} part {i}", partial(source, i, parts)) for i in range(parts)]
    return [IterableShard(name, source, whole=True)]


def _hf_shards(dataset: Any, kind: str) -> list[IterableShard]:
    """Return the shards of a Hugging Face IterableDataset; one if it must be read front to back."""
    if private_of(dataset, "datasets.IterableDataset._distributed") is not None:
        raise ValueError(f"{kind} was split by rank (split_dataset_by_node). Pass the whole dataset.")

    count = int(dataset.num_shards)
    operation = _counts_across_shards(dataset) if count > 1 else None
    if operation is not None:
        warn(
            f"{kind} has {operation}, which counts rows over all its {count} shards. One process reads it, "
            "front to back. To read shards side by side, use filter(), and a mixture of THDDataModule.",
            SlowWarning,
        )
        count = 1
    return [
        IterableShard(f"{kind} shard {i}", partial(_part, dataset, i, count), replays=True)
        for i in range(count)
    ]


def _counts_across_shards(dataset: Any) -> str | None:
    """Return the operation of a dataset that counts rows over all shards, as a user wrote it; else None."""
    steps = [private_of(dataset, "datasets.IterableDataset._ex_iterable")]
    while steps:
        step = steps.pop()
        name = type(step).__name__.removesuffix("ExamplesIterable")
        if name in _ACROSS and getattr(step, "split_when_sharding", True):
            return _ACROSS[name]
        for option in ("drop_last_batch", "with_indices"):
            if getattr(step, option, False):
                return f"{option}=True"
        inputs = [getattr(step, "ex_iterable", None), *getattr(step, "ex_iterables", [])]
        steps += [step for step in inputs if step is not None]
    return None


def _part(dataset: Any, index: int, count: int) -> Any:
    """Return one of ``count`` shards of a Hugging Face IterableDataset; any dataset if ``count=1``."""
    if not is_hf(dataset):
        return dataset
    if count > 1:
        part = dataset.shard(num_shards=count, index=index)
        part.set_epoch(dataset.epoch)
        return part
    # A copy, so that the epochs of passes do not change the one that the user set. The package datasets keeps
    # it in a tensor that processes share, and its copies share all their attributes.
    part = copy.copy(dataset)
    part.__dict__ = {name: x.clone() if isinstance(x, Tensor) else x for name, x in vars(dataset).items()}
    return part


def _positional(function: Callable[..., Any]) -> list[str]:
    """Return the names of the positional parameters that have no default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built-in functions have no signature
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
    """Return whether a source can only be iterated: an iterable, a function, or a list of these."""
    if isinstance(source, str | Path):
        return False
    if isinstance(source, IterableDataset) or is_hf(source) or inspect.isgenerator(source):
        return True
    if isinstance(source, list | tuple):
        return bool(source) and all(map(is_stream, source))
    sized = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    return not sized and (callable(source) or hasattr(source, "__iter__"))


def open_shards(source: Any, *, parts: int) -> list[Shard]:
    """Return the shards of a source, or of all sources in a list."""
    sources = source if isinstance(source, list | tuple) else [source]
    shards: list[Shard] = []
    for number, entry in enumerate(sources):
        if isinstance(entry, str | Path):
            shards += [file_shard(name) for name in expand(entry)]
        else:
            prefix = f"{number}/" if len(sources) > 1 else ""
            shards += iterable_shards(entry, parts, prefix=prefix)
    if not shards:
        raise ValueError("The stream has no shards: its source is an empty list. Pass at least one path.")
    _name_blank_files(shards)
    return shards


def _name_blank_files(shards: Sequence[Shard]) -> None:
    """Raise if all shards are blank files; name those that are, which is no fault of a file among others."""
    files = [shard for shard in shards if isinstance(shard, FileShard)]
    blank = [file.name for file in files if file.is_blank()]
    refuse_all_blank(blank, len(shards))
    if blank:
        rank_zero_info(name_blank(blank, len(files)))


def first_records(shard: Shard) -> str | None:
    """Return a hash of the first records, to compare ranks by; None if they cannot be read."""
    with contextlib.suppress(Exception):  # the stream will raise the error again, with its row
        records = [record for _, record, _ in islice(shard.read(0), _COMPARED)]
        return hashlib.sha256(pickle.dumps(records)).hexdigest()
    return None
