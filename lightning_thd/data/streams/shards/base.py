"""The interface of a shard: numbered records that can be read from any row on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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
        """Yield row, record and mark from row ``start`` on; a record that cannot be read is a ``Bad``.

        Args:
            start: the first row.
            mark: a place at or before it, which a former reading gave.

        Returns:
            With each record None, or now and then a mark: the state from which the source goes on with the
            row after it.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """The shards of a stream, in the order given.

    Attributes:
        shards: the shards.
        replays: whether reading again gives the same records for sure, as files do.
        read_once: objects that one rank reads for all, by the name of their shard. They must not split
            themselves by rank.
    """

    shards: Sequence[Shard]
    replays: bool
    read_once: Mapping[str, Any] = field(default_factory=dict)
