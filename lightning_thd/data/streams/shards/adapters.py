"""Sources of other libraries (MosaicML Streaming, torchdata nodes, iterables with a state) -> shards.

Nothing here imports these libraries: what a source is, its class tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_thd.data.streams.shards.base import Mark, Rows

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

    def fetch(self, rows: Sequence[int], offsets: Sequence[int]) -> list[Any]:
        """Read samples by their numbers."""
        return [self.dataset[self.first + row] for row in rows]


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
        content = _content(dataset, number)
        shards.append(MosaicShard(f"{name} shard {number}", count, dataset, first, content))
        first += count
    return shards


def _content(dataset: Any, number: int) -> str:
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


def read_with_state(source: Any, start: int, mark: Mark | None) -> Rows:
    """Read a source that saves its position from a saved state on, saving further states as it goes.

    Args:
        source: a ``torchdata`` node, or an iterable with ``state_dict`` and ``load_state_dict``.
        start: the first row that is wanted.
        mark: a state at or before it; None begins anew.

    Returns:
        Rows, each ``_MARK_EVERY``-th with the mark of the row after it.
    """
    row, state = (0, None) if mark is None else mark
    records: Iterator[Any]
    if is_node(source):
        source.reset(state)
        records = source
    else:
        if state is not None:
            source.load_state_dict(state)
        records = iter(source)
    keeps = True
    for record in records:
        row += 1
        place: Mark | None = None
        if keeps and row % _MARK_EVERY == 0:
            try:
                place = row, source.state_dict()
            except NotImplementedError:  # a node that has none: it is begun anew and passed over
                keeps = False
        if row > start:
            yield row - 1, record, place
