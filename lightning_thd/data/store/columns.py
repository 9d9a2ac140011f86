"""Arrow columns of lists -> rows as views of them, and counts, with no Python object a token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lightning_thd._imports import require
from lightning_thd.batch.keys import IGNORE_INDEX
from lightning_thd.batch.media import COLUMNS, GRIDS
from lightning_thd.batch.samples import MOST_ID, wrapped

IntArray = NDArray[np.int64]
Facts = tuple[IntArray, NDArray[np.bool_], IntArray]


class ColumnRows(Dataset[dict[str, NDArray[Any]]]):
    """Rows of an Arrow table whose columns are lists of numbers: each a view of the column's values."""

    keeps_rows = True  # Rows stay as they are when others are read.

    def __init__(self, source: Any, names: list[str]) -> None:
        self._source, self.names = source, names
        found = arrow_table(source)
        self.table = source() if found is None else found
        self._indices = None if found is None else getattr(source, "_indices", None)
        self._order = None if self._indices is None else np.asarray(self._indices.column(0))
        self._total = int(self.table.num_rows if self._order is None else len(self._order))
        self._columns = {name: _Column(self.table.column(name)) for name in names}

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, i: int) -> dict[str, NDArray[Any]]:
        if not -len(self) <= i < len(self):
            raise IndexError(f"Row {i} was asked of {len(self)}. Pass a number below that.")
        at = int(i % len(self) if self._order is None else self._order[i])
        return {name: column.row(at) for name, column in self._columns.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return ColumnRows, (self._source, self.names)


class _Column:
    """The offsets and values of a column of lists, or of numbers, chunk by chunk, opened when asked for."""

    def __init__(self, column: Any) -> None:
        self._chunks = column.chunks
        self._ends = np.cumsum([len(chunk) for chunk in self._chunks])
        self._opened: dict[int, tuple[NDArray[Any] | None, NDArray[Any]]] = {}

    def row(self, at: int) -> Any:
        chunk = int(np.searchsorted(self._ends, at, side="right"))
        if chunk not in self._opened:
            self._opened[chunk] = _offsets_and_values(self._chunks[chunk])
        offsets, values = self._opened[chunk]
        row = at - (int(self._ends[chunk - 1]) if chunk else 0)
        return values[row] if offsets is None else values[offsets[row] : offsets[row + 1]]


def _offsets_and_values(chunk: Any) -> tuple[NDArray[Any] | None, NDArray[Any]]:
    """Return where each row begins among the values of a chunk (None for numbers), and the values."""
    pt = require("pyarrow", feature="reading Arrow columns").types
    if not pt.is_nested(chunk.type):
        if chunk.null_count:
            raise ValueError(
                f"A column of labels has {chunk.null_count} rows without one. Give each row one."
            )
        return None, chunk.to_numpy(zero_copy_only=False)
    if pt.is_fixed_size_list(chunk.type):
        offsets = (np.arange(len(chunk) + 1) + chunk.offset) * chunk.type.list_size
    else:
        offsets = np.asarray(chunk.offsets)
    values = chunk.values
    if values.null_count:  # rows that hold one are refused when they are counted; read, they must not pass
        bounds = np.iinfo(values.type.to_pandas_dtype()) if pt.is_integer(values.type) else None
        least = np.nan if bounds is None else max(bounds.min, -(2**31)) if bounds.min else bounds.max
        values = values.fill_null(least)
    return offsets, values.to_numpy(zero_copy_only=True)


def map_arrow(path: Path, name: str) -> Any:
    """Map an Arrow file, of the stream or the file format, into memory as a table."""
    pa = require("pyarrow", feature="reading .arrow files")
    try:
        source = pa.memory_map(str(path))
        try:
            return pa.ipc.open_file(source).read_all()
        except pa.ArrowInvalid:
            return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
    except pa.ArrowInvalid as err:
        raise ValueError(f"{name} is no Arrow file ({err}). Write it again.") from err


def arrow_table(dataset: object) -> Any | None:
    """Return the Arrow table behind a ``datasets.Dataset`` or ``ColumnRows``; None for anything else."""
    if isinstance(dataset, ColumnRows):
        return dataset.table
    if not is_hugging_face(dataset):
        return None
    table = getattr(getattr(dataset, "data", None), "table", None)
    if table is None or (getattr(dataset, "format", None) or {}).get("type") == "custom":
        return None
    return table


def is_hugging_face(dataset: object) -> bool:
    """Return whether a dataset's samples are those of ``datasets.Dataset``."""
    giver = next((kind for kind in type(dataset).__mro__ if "__getitem__" in vars(kind)), object)
    return giver.__module__.partition(".")[0] == "datasets"


def visible_columns(dataset: object, table: Any) -> list[str]:
    """Return the columns that samples show; a dataset's ``with_format(columns=...)`` hides others."""
    if isinstance(dataset, ColumnRows):
        return dataset.names
    how = getattr(dataset, "format", None) or {}
    shown = None if how.get("output_all_columns") else how.get("columns")
    names: list[str] = table.column_names
    return names if shown is None else [name for name in names if name in shown]


def visible(dataset: object, values: NDArray[Any]) -> NDArray[Any]:
    """Pick the rows that a dataset's ``select``, ``shuffle`` and ``filter`` left, in their order."""
    indices = getattr(dataset, "_indices", None)
    return values if indices is None else values[np.asarray(indices.column(0))]


def _compute() -> Any:
    return require("pyarrow.compute", feature="reading Arrow columns")


def list_lengths(table: Any, name: str) -> IntArray:
    """Return the length of every list of a column, int64 ``[rows]``; 0 for an absent list."""
    pc = _compute()
    lengths = pc.fill_null(pc.list_value_length(table.column(name)), 0)
    return np.asarray(lengths).astype(np.int64)


def lists(table: Any, name: str) -> Iterator[tuple[Any, IntArray]]:
    """Yield a column of lists chunk by chunk: the flat values as an Arrow array, and the lists' lengths."""
    pc = _compute()
    for chunk in table.column(name).chunks:
        lengths = np.asarray(pc.fill_null(pc.list_value_length(chunk), 0)).astype(np.int64)
        yield chunk.flatten(), lengths


def is_list(table: Any, name: str, *, floats: bool = False) -> bool:
    """Return whether a column exists and holds lists of integers (of floats with ``floats=True``)."""
    if name not in table.column_names:
        return False
    pt = require("pyarrow", feature="reading Arrow columns").types

    kind = table.schema.field(name).type
    of_lists = pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind)
    return bool(of_lists and (pt.is_integer(kind.value_type) or (floats and pt.is_floating(kind.value_type))))


def is_label(table: Any, name: str) -> bool:
    """Return whether a column holds labels of whole sequences: a number a row, or a list under ``label``."""
    if name not in ("label", "labels") or name not in table.column_names:
        return False
    pt = require("pyarrow", feature="reading Arrow columns").types
    kind = table.schema.field(name).type
    if pt.is_integer(kind) or pt.is_floating(kind) or pt.is_boolean(kind):
        return True
    return name == "label" and is_list(table, name, floats=True)


class Counted(NamedTuple):
    """What columns give for every row, and the largest id with its row; (-1, 0) without tokens."""

    lengths: IntArray
    loss_tokens: IntArray
    largest: IntArray
    wrong: NDArray[np.bool_]


def count_columns(dataset: object) -> Counted | None:
    """Count tokens and loss tokens of every sequence by the columns ``input_ids`` and ``labels``."""
    table = arrow_table(dataset)
    if table is None:
        return None
    table = table.select(visible_columns(dataset, table))
    if not is_list(table, "input_ids"):
        return None
    if any(name in table.column_names and not is_list(table, name) for name in ("labels", "attention_mask")):
        return None
    lengths = list_lengths(table, "input_ids")
    _, wrong, most_of = _facts(table, "input_ids", lambda values: (values < 0) | (values > MOST_ID))
    loss_tokens = np.maximum(lengths - 1, 0)
    if "labels" in table.column_names:
        loss_tokens, bad, _ = _facts(
            table,
            "labels",
            lambda values: ((values < 0) & (values != IGNORE_INDEX)) | (values > MOST_ID) | wrapped(values),
        )
        wrong = wrong | bad | (list_lengths(table, "labels") != lengths)
    if "attention_mask" in table.column_names:
        wrong = wrong | _facts(table, "attention_mask", lambda values: values != 1)[1]
        wrong |= list_lengths(table, "attention_mask") != lengths
    most = visible(dataset, most_of)
    at = int(most.argmax()) if len(most) else 0
    return Counted(
        visible(dataset, lengths),
        visible(dataset, loss_tokens),
        np.array([most[at] if len(most) else -1, at], np.int64),
        visible(dataset, wrong),
    )


def count_grids(dataset: object) -> IntArray | None:
    """Count the image patches of every row by its columns of grids, int64 ``[N, 4]``; None without them."""
    table = arrow_table(dataset)
    found = [] if table is None else [name for name in GRIDS if name in visible_columns(dataset, table)]
    if table is None or not found:
        return None
    sizes = np.zeros((table.num_rows, COLUMNS), np.int64)
    for name in found:
        first = 0
        for chunk in table.column(name).chunks:
            images = getattr(chunk, "storage", chunk)  # an Array2D has one
            if _depth(images.type) != 2:
                return None
            counts = np.asarray(_compute().fill_null(_compute().list_value_length(images), 0))
            grids = np.asarray(images.flatten().flatten()).astype(np.int64)
            if len(grids) != 3 * counts.sum():
                raise ValueError(f"The column {name!r} holds rows of other than frames, rows and columns.")
            rows = first + np.repeat(np.arange(len(counts)), counts)
            frames, areas = grids[::3], grids[1::3] * grids[2::3]
            np.add.at(sizes[:, 0], rows, frames * areas)
            np.add.at(sizes[:, 1], rows, frames * areas * areas)
            first += len(chunk)
    return np.asarray(visible(dataset, sizes))


def _depth(kind: Any) -> int:
    """Return how many lists are around the integers of an Arrow type, -1 for other types."""
    pt = require("pyarrow", feature="reading Arrow columns").types
    if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        inner = _depth(kind.value_type)
        return inner if inner < 0 else inner + 1
    return 0 if pt.is_integer(kind) else -1


def _facts(table: Any, name: str, refuse: Callable[[NDArray[Any]], NDArray[np.bool_]]) -> Facts:
    """Return targets, faults and the largest value of every row of a column of lists."""
    parts: list[Facts] = [(np.empty(0, np.int64), np.empty(0, bool), np.empty(0, np.int64))]
    for values, lengths in lists(table, name):
        total, rows = len(lengths), np.flatnonzero(lengths)
        targets, wrong, most = np.zeros(total, np.int64), np.zeros(total, bool), np.full(total, -1, np.int64)
        if len(rows):
            begins = (np.cumsum(lengths) - lengths)[rows]
            array = np.asarray(values.fill_null(0) if values.null_count else values)
            bad, learned = refuse(array), array != IGNORE_INDEX
            if values.null_count:
                bad |= np.asarray(values.is_null())
            learned[begins] = False  # a first label is never a target
            targets[rows] = np.add.reduceat(learned, begins, dtype=np.int64)
            wrong[rows] = np.logical_or.reduceat(bad, begins)
            most[rows] = np.maximum.reduceat(array, begins)
        parts.append((targets, wrong, most))
    targets, wrong, most = (np.concatenate(column) for column in zip(*parts, strict=True))
    return targets, wrong, most


def column_row(dataset: object, i: int) -> dict[str, Any] | None:
    """Read the ids, labels and mask of a row from the columns; None for a dataset without."""
    table = arrow_table(dataset)
    if table is None:
        return None
    at = int(visible(dataset, np.arange(table.num_rows))[i])
    read = ("input_ids", "labels", "attention_mask")
    cells = {name: table.column(name)[at] for name in read if name in table.column_names}
    pt = require("pyarrow", feature="reading Arrow columns").types
    return {
        name: np.asarray(cell.values)
        if cell.is_valid and pt.is_unsigned_integer(cell.type.value_type) and not cell.values.null_count
        else cell.as_py() or []
        for name, cell in cells.items()
    }
