"""Files or a dataset of conversations -> records by number; datasets and JSONL are read when needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_thd.data.read.files import KINDS, SourceFile
from lightning_thd.data.read.records import Bad, Line, file_chunks, holds_lines, parse_line, without_nulls
from lightning_thd.data.store.columns import arrow_table, is_hugging_face
from lightning_thd.data.store.index import MapDataset, Places

Place = str | Line
# The place of a record for messages, the record, and the folder at which its relative paths start.
PlacedRecord = tuple[Place, Mapping[str, Any], Path | None]


class RecordsByNumber:
    """The records of files: ``[i]`` gives the place of a record, the record, and the folder of its file."""

    def __init__(self, files: list[SourceFile]) -> None:
        self._of_files = [_open_by_number(file) for file in files]
        self._folders = _folders_of(files)
        # The number behind the last record of each file, int64 ``[files]``.
        self._ends = np.cumsum([len(records) for records in self._of_files])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, i: int) -> PlacedRecord:
        file = int(np.searchsorted(self._ends, i, side="right"))
        from_end = i - int(self._ends[file])  # negative, as an index into the records of the file
        place, record = self._of_files[file][from_end]
        return place, _checked(record, place), self._folders[file]


def _folders_of(files: Sequence[SourceFile]) -> list[Path | None]:
    """Return for each file the folder at which relative paths start; None for a file at an address."""
    return [None if "://" in file.name else Path(file.name).parent for file in files]


def _checked(record: Any, place: Place) -> Mapping[str, Any]:
    """Return a record that is a dict, or raise with its place."""
    if isinstance(record, Bad):
        raise ValueError(f"{place}: {record.reason}")
    if not isinstance(record, Mapping):
        raise ValueError(f"{place}: a {type(record).__name__} is not a conversation for processor=.")
    return record


def _open_by_number(file: SourceFile) -> Any:
    """Return the records of a file, with their places, by number; only those of lines are left on disk."""
    kind = KINDS.get(file.suffix, "text")
    if kind == "JSONL" or (kind == "JSON" and holds_lines(file)):
        return _Lines(file)
    return [placed for chunk in file_chunks([file]) for placed in chunk()]


class _Lines:
    """The lines of a JSONL file; only the byte at which each line begins is kept in memory."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        starts = []
        offset = 0
        with file.path.open("rb") as opened:
            for line in opened:
                if line.strip():
                    starts.append(offset)
                offset += len(line)
        self._starts = np.array(starts, np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, i: int) -> tuple[Place, Any]:
        start = int(self._starts[i])
        # Opened for each line, so that worker processes do not share the position in one open file.
        with self._file.path.open("rb") as opened:
            opened.seek(start)
            return Line(self._file.name, self._file.path, start), parse_line(opened.readline())


class RowsByNumber:
    """The rows of a dataset; images of a Hugging Face dataset without transform are not decoded.

    ``files`` are those from which the dataset was loaded, if any; file k holds ``rows[k]`` rows.
    """

    def __init__(
        self, dataset: MapDataset, files: Sequence[SourceFile] = (), rows: Sequence[int] = ()
    ) -> None:
        self._folders = _folders_of(files)
        self._ends = np.cumsum(rows)
        self._places = Places.of_files([file.name for file in files], rows)
        source: Any = dataset
        # As Arrow tables, rows hold images as they are stored; datasets would decode them.
        self._as_arrow = is_hugging_face(dataset) and arrow_table(dataset) is not None
        self._dataset = source.with_format("arrow") if self._as_arrow else source

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> PlacedRecord:
        row = self._dataset[i]
        if self._as_arrow:
            [row] = row.to_pylist()
        if isinstance(row, dict) and not isinstance(self._dataset, list | tuple):
            row = without_nulls(row)  # columns add nulls; in a list, as in JSONL, a null is a value

        folder = None
        if self._folders:
            folder = self._folders[int(np.searchsorted(self._ends, i, side="right"))]
        place = self._places.name(i, "row")
        return place, _checked(row, place), folder
