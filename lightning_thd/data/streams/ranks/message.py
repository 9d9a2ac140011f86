"""A table of sequences that a rank read -> one message of 8 bytes a sequence, and back.

A sequence takes its length and its number of loss tokens, 4 bytes each. Where it is from takes 24 bytes for
every run of neighbouring rows of a shard. What few streams have (weights, further keys) is a
column more, once some rank has it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lightning_thd.data.streams.samples import META, POLICIES

Bytes = npt.NDArray[np.uint8]
Table = npt.NDArray[np.void]

_RUN = np.dtype([("shard", "<i4"), ("round", "<i4"), ("keys", "<i4"), ("count", "<i4"), ("row", "<i8")])
_BASE = ("length", "tokens")  # int32 each
_COLUMNS = {"extra": "<i4", "weight": "<f8", "sequences": "<f8"}
_INT32 = np.iinfo(np.int32).max


def header_type(sources: int) -> np.dtype[np.void]:
    """Return the dtype of a message's header, a rank's status in 60 bytes and 12 for each source."""
    return np.dtype(
        [
            *((name, "<i4") for name in ("failed", "count", "columns", "runs", "marks")),
            *((name, "<i8") for name in POLICIES),
            ("exhausted", "<i4", (sources,)),
            ("bad", "<i8", (sources,)),
        ]
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The columns and the number of runs that the messages of all ranks have room for.

    Attributes:
        columns: bit ``i`` for the ``i``-th of the further columns.
        runs: of neighbouring rows.
    """

    columns: int = 0
    runs: int = 1

    @property
    def names(self) -> list[str]:
        """Return the names of the optional columns that messages carry."""
        return [name for i, name in enumerate(_COLUMNS) if self.columns >> i & 1]

    def nbytes(self, most: int) -> int:
        """Return the bytes of a message's body for up to ``most`` sequences: 8 each, and 24 a run."""
        each = 4 * len(_BASE) + sum(np.dtype(_COLUMNS[name]).itemsize for name in self.names)
        return self.runs * _RUN.itemsize + most * each


def in_runs(table: Table) -> npt.NDArray[np.int64]:
    """Return the order in which neighbouring rows of a shard follow each other, int64 ``[S]``."""
    return np.lexsort((table["row"], table["round"], table["shard"]))


def needed(table: Table) -> Layout:
    """Return the smallest layout that holds a table, sorted by :func:`in_runs`."""
    columns = {
        "extra": table["extra"] != 0,
        "weight": (table["weight"] != np.floor(table["weight"])) | (table["weight"] > _INT32),
        "sequences": table["sequences"] != (table["weight"] > 0),
    }
    bits = sum(1 << i for i, name in enumerate(_COLUMNS) if columns[name].any())
    return Layout(columns=bits, runs=len(_starts(table)))


def _starts(table: Table) -> npt.NDArray[np.int64]:
    """Return where runs of neighbouring rows begin."""
    if not len(table):
        return np.empty(0, np.int64)
    breaks = np.diff(table["row"]) != 1
    for name in ("shard", "round", "keys"):
        breaks |= np.diff(table[name]) != 0
    return np.concatenate([[0], np.flatnonzero(breaks) + 1])


def encode(table: Table, header: Table, layout: Layout, most: int) -> Bytes:
    """Encode a table of sequences as one message, uint8, as long as every other rank's.

    Args:
        table: ``META``, sorted by :func:`in_runs`.
        header: one entry of :func:`header_type`; what the table needs is written into it.
        layout: of the messages of all ranks. Where the table needs more, the header alone is sent.
        most: sequences that any rank sends.
    """
    wanted = needed(table)
    header["count"], header["columns"], header["runs"] = len(table), wanted.columns, wanted.runs
    message = np.zeros(header.dtype.itemsize + layout.nbytes(most), np.uint8)
    message[: header.dtype.itemsize] = header.view(np.uint8)
    if not len(table) or not _holds(layout, wanted):
        return message
    starts = _starts(table)
    runs, columns = _views(message[header.dtype.itemsize :], layout, most)
    for name in ("shard", "round", "keys", "row"):
        runs[name][: len(starts)] = table[name][starts]
    runs["count"][: len(starts)] = np.diff(starts, append=len(table))
    for name, column in columns.items():
        source = table["weight"] if name == "tokens" else table[name]
        if not (name == "tokens" and "weight" in columns):
            column[: len(table)] = source
    return message


def decode(message: Bytes, header: Table, layout: Layout, most: int) -> Table:
    """Decode the table in a message that :func:`encode` wrote with the same layout."""
    count, size = int(header["count"]), header.dtype.itemsize
    table = np.zeros(count, META)
    runs, columns = _views(message[size:], layout, most)
    runs = runs[: int(header["runs"])]
    if not count:
        return table
    for name in ("shard", "round", "keys"):
        table[name] = np.repeat(runs[name], runs["count"])
    ends = np.cumsum(runs["count"])
    table["row"] = np.arange(count) + np.repeat(runs["row"] - (ends - runs["count"]), runs["count"])
    table["length"], table["weight"] = columns["length"][:count], columns["tokens"][:count]
    table["sequences"] = table["weight"] > 0
    for name in layout.names:
        table[name] = columns[name][:count]
    if "weight" in layout.names and "sequences" not in layout.names:
        table["sequences"] = table["weight"] > 0
    return table


def widened(layout: Layout, headers: Table) -> Layout | None:
    """Return a wider layout that all ranks' tables fit, or None where the present one suffices."""
    wanted = Layout(
        columns=int(np.bitwise_or.reduce(headers["columns"])) | layout.columns,
        runs=max(1, int(headers["runs"].max())),
    )
    return None if _holds(layout, wanted) else wanted


def settled(layout: Layout, headers: Table) -> Layout:
    """Return the layout for the next messages, with room for as many runs of rows as the last ones had."""
    return replace(layout, runs=max(1, int(headers["runs"].max())))


def _holds(layout: Layout, wanted: Layout) -> bool:
    return wanted.runs <= layout.runs and not wanted.columns & ~layout.columns


def _views(body: Bytes, layout: Layout, most: int) -> tuple[Table, dict[str, npt.NDArray[np.number]]]:
    """Return views of the runs and columns in a message's body."""
    at = layout.runs * _RUN.itemsize
    runs = body[:at].view(_RUN)
    columns = {}
    for name in (*_BASE, *layout.names):
        kind = np.dtype(_COLUMNS.get(name, "<i4"))
        columns[name] = body[at : at + most * kind.itemsize].view(kind)
        at += most * kind.itemsize
    return runs, columns
