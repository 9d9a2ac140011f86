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
        """Yield row, record and mark from row ``start`` on; a record that cannot be read is a ``Bad``."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """The shards of a stream, in the order given."""

    shards: Sequence[Shard]  # the shards
    replays: bool  # whether reading again gives the same records for sure, as files do
    read_once: Mapping[str, Any] = field(default_factory=dict)
