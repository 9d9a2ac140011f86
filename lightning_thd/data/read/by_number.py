"""Files or a dataset of conversations -> records by number; datasets and JSONL are read when needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_thd.data.read.files import KINDS, SourceFile
from lightning_thd.data.read.records import Bad, Line, file_chunks, holds_lines, parse_line, without_nulls
from lightning_thd.data.store.columns import arrow_table, is_hugging_face
from lightning_thd.data.store.index import MapDataset

Place = str | Line
Found = tuple[Place, Mapping[str, Any], Path | None]


class RecordsByNumber:
    """The records of files: ``[i]`` gives the place of a record, the record, and the folder of its file."""

    def __init__(self, files: list[SourceFile]) -> None:
        self._parts = [_open_by_number(file) for file in files]
        self._folders = _folders_of(files)
        self._ends = np.cumsum([len(part) for part in self._parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, i: int) -> Found:
        part = int(np.searchsorted(self._ends, i, side="right"))
        place, record = self._parts[part][i - int(self._ends[part])]
        return place, _checked(record, place), self._folders[part]


def _folders_of(files: Sequence[SourceFile]) -> list[Path | None]:
    return [None if "://" in file.name else Path(file.name).parent for file in files]


def _checked(record: Any, place: Place) -> Mapping[str, Any]:
    if isinstance(record, Bad):
        raise ValueError(f"{place}: {record.reason}")
    if not isinstance(record, Mapping):
        raise ValueError(f"{place}: a {type(record).__name__} is not a conversation for processor=.")
    return record


def _open_by_number(file: SourceFile) -> Any:
    kind = KINDS.get(file.suffix, "text")
    if kind == "JSONL" or (kind == "JSON" and holds_lines(file)):
        return _Lines(file)
    return [found for chunk in file_chunks([file]) for found in chunk()]


class _Lines:
    """The lines of a JSONL file; only the byte at which each line begins is kept in memory."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        starts, at = [], 0
        with file.path.open("rb") as opened:
            for line in opened:
                if line.strip():
                    starts.append(at)
                at += len(line)
        self._starts = np.array(starts, np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, i: int) -> tuple[Place, Any]:
        at = int(self._starts[i])
        with self._file.path.open("rb") as opened:
            opened.seek(at)
            return Line(self._file.name, self._file.path, at), parse_line(opened.readline())


class RowsByNumber:
    """The rows of a dataset; images of a Hugging Face dataset without transform are not decoded.

    ``files`` are those from which the dataset was loaded, if any; file k holds ``rows[k]`` rows.
    """

    def __init__(
        self, dataset: MapDataset, files: Sequence[SourceFile] = (), rows: Sequence[int] = ()
    ) -> None:
        self._folders, self._ends = _folders_of(files), np.cumsum(rows)
        self._arrow = is_hugging_face(dataset) and arrow_table(dataset) is not None
        self._dataset: Any = dataset.with_format("arrow") if self._arrow else dataset  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> Found:
        row = self._dataset[i].to_pylist()[0] if self._arrow else self._dataset[i]
        place = f"row {i}"
        folder = self._folders[int(np.searchsorted(self._ends, i, side="right"))] if self._folders else None
        if isinstance(row, dict) and not isinstance(self._dataset, list | tuple):
            row = without_nulls(row)  # columns add nulls; in a list, as in JSONL, a null is a value
        return place, _checked(row, place), folder
