"""Sources of other libraries (MosaicML Streaming, torchdata nodes, iterables with a state) -> shards.

Nothing here imports these libraries: what a source is, its class tells.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from lightning_thd.data.streams.shards.base import Mark, Rows

_NONE = object()  # no record at all
_MARK_EVERY = 64  # rows between two states that are kept: a resumed source passes over fewer


@dataclass(frozen=True, slots=True)
class MosaicShard:
    """One shard of a MosaicML ``StreamingDataset``, read by the numbers of its samples.

    ``content`` is what it is known by: where it is from, its files, their sizes and hashes.

    The dataset's own iterator splits its samples by rank and worker, for as many of them as there are now;
    asked for samples by number it does not, and downloads the shard it needs.
    """

    name: str
    size: int
    dataset: Any
    first: int
    content: str = ""

    def read(self, start: int, mark: Mark | None = None) -> Rows:
        """Read the samples from row ``start`` on."""
        for row in range(start, self.size):
            yield row, self.dataset[self.first + row], None


def is_mosaic(source: object) -> bool:
    """Return whether a source is a MosaicML ``StreamingDataset``."""
    return any(
        base.__name__ == "StreamingDataset" and base.__module__.startswith("streaming.")
        for base in type(source).__mro__
    )


def mosaic_shards(dataset: Any, name: str) -> list[MosaicShard]:
    """Return the shards of a MosaicML ``StreamingDataset``.

    Raises:
        ValueError: for one that draws samples more or less than once, which reading by shards would undo.
    """
    counts = [int(count) for count in dataset.samples_per_shard]
    chosen = [int(stream.choose) for stream in dataset.streams]
    held = [int(count) for count in dataset.samples_per_stream]
    if chosen != held:
        raise ValueError(
            f"{name} draws {chosen} samples of its streams, which hold {held} "
            "(proportion=, repeat=, choose= or epoch_size=). Leave these out, and mix with "
            "THDDataModule({'name': (dataset, weight), ...})."
        )
    shards, first = [], 0
    for number, count in enumerate(counts):
        content = _identity(dataset, number)
        shards.append(MosaicShard(f"{name} shard {number}", count, dataset, first, content))
        first += count
    return shards


def _identity(dataset: Any, number: int) -> str:
    """Return what identifies a shard's content without downloading it."""
    shards = getattr(dataset, "shards", None)
    if shards is None:
        return ""
    shard = shards[number]
    files = [
        (file.basename, file.bytes, sorted((file.hashes or {}).items()))
        for pair in shard.file_pairs
        for file in pair
        if file is not None
    ]
    places = [(stream.remote, stream.local, stream.split) for stream in dataset.streams]
    return repr((places, files, shard.samples))


def is_node(source: object) -> bool:
    """Return whether a source is a ``torchdata.nodes.BaseNode``."""
    return any(
        base.__name__ == "BaseNode" and base.__module__.startswith("torchdata.nodes")
        for base in type(source).__mro__
    )


def has_state(source: object) -> bool:
    """Return whether a source can save and restore its position."""
    return is_node(source) or (
        callable(getattr(source, "state_dict", None)) and callable(getattr(source, "load_state_dict", None))
    )


class Beginning:
    """Where a source with a state begins, for one that is left before its end and begun again.

    Such a source may go on where it was left, as after a checkpoint's pending records were read again.
    """

    def __init__(self, source: Any) -> None:
        self._state: Any = None  # as it came
        self._first: bytes | None = None  # what its first record was, once it was read
        self._left = False  # whether a reading began that has not come to its end
        with contextlib.suppress(Exception):  # of one that knows its place once it gave a record, or never
            self._state = _copied(source.state_dict())

    @classmethod
    def of(cls, source: Any) -> Beginning:
        """Return what is known of a source in this process, however many loaders read it."""
        try:
            found = _KNOWN.get(source)
            if found is None:
                _KNOWN[source] = found = cls(source)
        except TypeError:  # neither hashed nor referred to weakly
            found = cls(source)
        return found

    def anew(self, source: Any) -> Iterator[Any]:
        """Return the records of a source from the first on."""
        records = iter(source)
        left, self._left = self._left, True
        if left:
            first = next(records, _NONE)
            if first is not _NONE and (self._state is None or _content(first) == self._first):
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
                self._first = _content(record)
            yield record


_KNOWN: weakref.WeakKeyDictionary[Any, Beginning] = weakref.WeakKeyDictionary()


def _content(record: Any) -> bytes:
    """Return what two records have in common that are the same."""
    try:
        return pickle.dumps(record)
    except Exception:  # of a record of the user's that is not one for other processes
        return repr(record).encode()


def _copied(state: Any) -> Any:
    try:
        return copy.deepcopy(state)
    except Exception:  # of what no copy can be made of: the source has to keep it as it is
        return state


def read_with_state(source: Any, start: int, mark: Mark | None, beginning: Beginning) -> Rows:
    """Read a source that saves its position from a saved state on, saving further states as it goes.

    Args:
        source: a ``torchdata`` node, or an iterable with ``state_dict`` and ``load_state_dict``.
        start: the first row that is wanted.
        mark: a state at or before it; None begins anew.
        beginning: of the source, as it is known in this process.

    Returns:
        Rows, each ``_MARK_EVERY``-th with the mark of the row after it.
    """
    row, state = (0, None) if mark is None else mark
    records: Iterator[Any]
    if is_node(source):
        source.reset(state)
        records = source
    else:
        records = beginning.anew(source) if mark is None else beginning.at(source, state)
    keeps = True
    for record in records:
        row += 1
        place: Mark | None = None
        if keeps and row % _MARK_EVERY == 0:
            try:
                place = row, _copied(source.state_dict())
            except NotImplementedError:  # a node that has none: it is begun anew and passed over
                keeps = False
        if row > start:
            yield row - 1, record, place
    beginning.leave()
