"""Arrow columns of lists -> rows that are views of the columns, and counts; no Python object per token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lightning_thd._imports import require
from lightning_thd.batch.keys import IGNORE_INDEX
from lightning_thd.batch.media import GRIDS, PIXELS
from lightning_thd.batch.samples import MOST_ID, wrapped

IntArray = NDArray[np.int64]


class _ColumnFacts(NamedTuple):
    """Facts about each row of a column of lists."""

    lengths: IntArray  # values in the list, int64 ``[N]``
    targets: IntArray  # values other than -100 after the first, int64 ``[N]``
    wrong: NDArray[np.bool_]  # whether a value cannot be used, bool ``[N]``
    largest: IntArray  # the largest value, -1 of an empty list, int64 ``[N]``


class ColumnRows(Dataset[dict[str, Any]]):
    """Rows of an Arrow table: lists become views of the column's values, and numbers stay numbers."""

    keeps_rows = True  # a row stays unchanged when other rows are read

    def __init__(self, source: Any, names: list[str]) -> None:
        self._source = source
        self.names = names
        self.table: Any = arrow_table(source)
        self._indices = getattr(source, "_indices", None)
        # The row of the table behind each row of the dataset, int64 ``[N]``.
        self._table_rows = visible(self, np.arange(self.table.num_rows))
        self._columns = {name: self.table.column(name) for name in names}

    def __len__(self) -> int:
        return len(self._table_rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        table_row = int(self._table_rows[i])
        return {name: _value(column[table_row]) for name, column in self._columns.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        # Only the dataset is pickled: table and columns would be pickled beside it as copies.
        return ColumnRows, (self._source, self.names)


def _value(cell: Any) -> Any:
    """Return the value of a cell; a null inside a list becomes NaN, which is not a valid id."""
    is_list_cell = hasattr(cell, "values")
    if not is_list_cell:
        return cell.as_py()
    if cell.values is None:  # the list itself is null
        return np.empty(0, np.int64)
    return cell.values.to_numpy(zero_copy_only=False)


def arrow_table(dataset: object) -> Any:
    """Return the Arrow table behind ``ColumnRows`` or a ``datasets.Dataset`` without transform, else None."""
    if isinstance(dataset, ColumnRows):
        return dataset.table
    if not is_hugging_face(dataset):
        return None
    table = getattr(getattr(dataset, "data", None), "table", None)
    view = getattr(dataset, "format", None) or {}
    has_transform = view.get("type") == "custom"  # the rows differ from those of the table
    return None if has_transform else table


def is_hugging_face(dataset: object) -> bool:
    """Return whether a dataset's ``__getitem__`` is that of a class of the package ``datasets``."""
    # A user's subclass that overrides __getitem__ gives rows of its own, which the table does not hold.
    owner = next((kind for kind in type(dataset).__mro__ if "__getitem__" in vars(kind)), object)
    return owner.__module__.partition(".")[0] == "datasets"


def visible_columns(dataset: object, table: Any) -> list[str]:
    """Return the columns that samples have; ``with_format(columns=...)`` of datasets hides the others."""
    if isinstance(dataset, ColumnRows):
        return dataset.names

    names: list[str] = table.column_names
    view = getattr(dataset, "format", None) or {}
    shown = view.get("columns")
    if shown is None or view.get("output_all_columns"):
        return names
    return [name for name in names if name in shown]


def visible(dataset: object, values: NDArray[Any]) -> NDArray[Any]:
    """Take one value per row of the table; return those of the dataset's rows, in the dataset's order."""
    indices = getattr(dataset, "_indices", None)  # a table with one column, after select() or shuffle()
    return values if indices is None else values[np.asarray(indices.column(0))]


def is_list(table: Any, name: str, *, floats: bool = False) -> bool:
    """Return whether a column exists and holds lists of integers (or floats, with ``floats=True``)."""
    if name not in table.column_names:
        return False

    types = require("pyarrow", feature="reading Arrow columns").types
    kind = table.schema.field(name).type
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return False
    return bool(types.is_integer(kind.value_type) or (floats and types.is_floating(kind.value_type)))


def is_label(table: Any, name: str) -> bool:
    """Return whether a column labels whole sequences, by numbers, or by lists if it is named ``label``."""
    if name not in ("label", "labels") or name not in table.column_names:
        return False

    types = require("pyarrow", feature="reading Arrow columns").types
    kind = table.schema.field(name).type
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        return True
    return name == "label" and is_list(table, name, floats=True)


def count_columns(dataset: object) -> dict[str, NDArray[Any]] | None:
    """Count tokens and loss tokens; None unless ids (and any labels and masks) are Arrow integer lists.

    Returns:
        ``lengths``, ``loss_tokens``, ``largest``, ``largest_label`` and ``bad`` of a ``SequenceIndex``. A bad
        row has an id or label that is null or out of range, a mask with zeros, or labels or a mask of another
        length.
    """
    table = arrow_table(dataset)
    if table is None:
        return None
    table = table.select(visible_columns(dataset, table))
    if not is_list(table, "input_ids"):
        return None
    if any(name in table.column_names and not is_list(table, name) for name in ("labels", "attention_mask")):
        return None

    ids = _facts(table, "input_ids", _are_no_ids)
    lengths = ids.lengths
    largest = ids.largest
    wrong = ids.wrong
    loss_tokens = np.maximum(lengths - 1, 0)
    largest_label = np.full_like(largest, -1)
    if "labels" in table.column_names:
        labels = _facts(table, "labels", _are_no_labels)
        largest_label = labels.largest
        loss_tokens = labels.targets
        wrong = wrong | labels.wrong | (labels.lengths != lengths)
    if "attention_mask" in table.column_names:
        mask = _facts(table, "attention_mask", lambda values: values != 1)
        wrong = wrong | mask.wrong | (mask.lengths != lengths)

    # A bad row counts as empty.
    lengths[wrong] = 0
    loss_tokens[wrong] = 0
    largest[wrong] = -1
    largest_label[wrong] = -1

    return {
        "lengths": visible(dataset, lengths),
        "loss_tokens": visible(dataset, loss_tokens),
        "largest": _with_row(visible(dataset, largest)),
        "largest_label": _with_row(visible(dataset, largest_label)),
        "bad": np.flatnonzero(visible(dataset, wrong)),
    }


def _with_row(largest: IntArray) -> IntArray:
    """Return the largest value over all rows, and the first row that has it."""
    row = int(largest.argmax())
    return np.array([largest[row], row])


def _are_no_ids(values: NDArray[Any]) -> NDArray[np.bool_]:
    return (values < 0) | (values > MOST_ID)


def _are_no_labels(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which values are neither ids nor -100, or are -100 in an unsigned dtype."""
    out_of_range = ((values < 0) & (values != IGNORE_INDEX)) | (values > MOST_ID)
    return np.asarray(out_of_range | wrapped(values))


def without_pixels(dataset: Any) -> Any:
    """Drop each pixel column of a Hugging Face dataset that has a grid column with the numbers of patches.

    Counting reads every row, and pixels are most of it, while the grids say how many patches there are.
    """
    if arrow_table(dataset) is None or isinstance(dataset, ColumnRows):
        return dataset
    counted_by_grid = [
        pixels
        for grid, pixels in zip(GRIDS, PIXELS, strict=True)
        if {grid, pixels} <= set(dataset.column_names)
    ]
    return dataset.remove_columns(counted_by_grid)


def _facts(table: Any, name: str, are_wrong: Callable[[NDArray[Any]], NDArray[np.bool_]]) -> _ColumnFacts:
    """Return facts about each row of a list column; ``are_wrong`` says which of its values are wrong."""
    no_row = np.empty(0, np.int64)
    of_chunks = [_ColumnFacts(no_row, no_row, np.empty(0, bool), no_row)]
    of_chunks += [_facts_of_chunk(chunk, are_wrong) for chunk in table.column(name).chunks]
    return _ColumnFacts(*(np.concatenate(column) for column in zip(*of_chunks, strict=True)))


def _facts_of_chunk(chunk: Any, are_wrong: Callable[[NDArray[Any]], NDArray[np.bool_]]) -> _ColumnFacts:
    compute = require("pyarrow.compute", feature="reading Arrow columns")
    lengths = np.asarray(compute.fill_null(compute.list_value_length(chunk), 0)).astype(np.int64)
    targets = np.zeros(len(lengths), np.int64)
    wrong = np.zeros(len(lengths), bool)
    largest = np.full(len(lengths), -1, np.int64)

    # numpy's reduceat gives a value of the next row for an empty one, so empty rows take no part.
    filled = np.flatnonzero(lengths)
    if not len(filled):
        return _ColumnFacts(lengths, targets, wrong, largest)

    begins = (np.cumsum(lengths) - lengths)[filled]
    values = chunk.flatten()
    array = np.asarray(values.fill_null(0) if values.null_count else values)

    is_wrong = are_wrong(array)
    if values.null_count:
        is_wrong |= np.asarray(values.is_null())
    wrong[filled] = np.logical_or.reduceat(is_wrong, begins)

    is_target = array != IGNORE_INDEX
    is_target[begins] = False  # the first token of a row is not a target
    targets[filled] = np.add.reduceat(is_target, begins, dtype=np.int64)

    largest[filled] = np.maximum.reduceat(array, begins)
    return _ColumnFacts(lengths, targets, wrong, largest)
