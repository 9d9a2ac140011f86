"""Arrow columns of lists -> rows that are views of the columns, and counts; no Python object per token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lightning_thd._imports import require
from lightning_thd.batch.keys import IGNORE_INDEX
from lightning_thd.batch.media import GRIDS, PIXELS
from lightning_thd.batch.samples import MOST_ID, wrapped

IntArray = NDArray[np.int64]
Facts = tuple[IntArray, IntArray, NDArray[np.bool_], IntArray]  # what ``_facts`` returns


class ColumnRows(Dataset[dict[str, Any]]):
    """Rows of an Arrow table: lists become views of the column's values, and numbers stay numbers."""

    keeps_rows = True  # a row stays unchanged when other rows are read

    def __init__(self, source: Any, names: list[str]) -> None:
        self._source, self.names = source, names
        self.table: Any = arrow_table(source)
        self._indices = getattr(source, "_indices", None)
        self._order = visible(self, np.arange(self.table.num_rows))
        self._columns = {name: self.table.column(name) for name in names}

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, i: int) -> dict[str, Any]:
        at = int(self._order[i])
        return {name: _value(column[at]) for name, column in self._columns.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return ColumnRows, (self._source, self.names)


def _value(cell: Any) -> Any:
    """Return the value of a cell; a null inside a list becomes NaN, which is not a valid id."""
    if not hasattr(cell, "values"):
        return cell.as_py()
    return np.empty(0, np.int64) if cell.values is None else cell.values.to_numpy(zero_copy_only=False)


def arrow_table(dataset: object) -> Any:
    """Return the Arrow table behind ``ColumnRows`` or a ``datasets.Dataset`` without transform, else None."""
    if isinstance(dataset, ColumnRows):
        return dataset.table
    if not is_hugging_face(dataset):
        return None
    table = getattr(getattr(dataset, "data", None), "table", None)
    if table is None or (getattr(dataset, "format", None) or {}).get("type") == "custom":
        return None
    return table


def is_hugging_face(dataset: object) -> bool:
    """Return whether a dataset's ``__getitem__`` is that of a class of the package ``datasets``."""
    base = next((kind for kind in type(dataset).__mro__ if "__getitem__" in vars(kind)), object)
    return base.__module__.partition(".")[0] == "datasets"


def visible_columns(dataset: object, table: Any) -> list[str]:
    """Return the columns that samples have; ``with_format(columns=...)`` of datasets hides the others."""
    if isinstance(dataset, ColumnRows):
        return dataset.names
    form = getattr(dataset, "format", None) or {}
    shown = None if form.get("output_all_columns") else form.get("columns")
    names: list[str] = table.column_names
    return names if shown is None else [name for name in names if name in shown]


def visible(dataset: object, values: NDArray[Any]) -> NDArray[Any]:
    """Take one value per row of the table; return those of the dataset's rows, in the dataset's order."""
    indices = getattr(dataset, "_indices", None)
    return values if indices is None else values[np.asarray(indices.column(0))]


def is_list(table: Any, name: str, *, floats: bool = False) -> bool:
    """Return whether a column exists and holds lists of integers (or floats, with ``floats=True``)."""
    if name not in table.column_names:
        return False
    pt = require("pyarrow", feature="reading Arrow columns").types

    kind = table.schema.field(name).type
    of_lists = pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind)
    return bool(of_lists and (pt.is_integer(kind.value_type) or (floats and pt.is_floating(kind.value_type))))


def is_label(table: Any, name: str) -> bool:
    """Return whether a column labels whole sequences, by numbers, or by lists if it is named ``label``."""
    if name not in ("label", "labels") or name not in table.column_names:
        return False
    pt = require("pyarrow", feature="reading Arrow columns").types
    kind = table.schema.field(name).type
    if pt.is_integer(kind) or pt.is_floating(kind) or pt.is_boolean(kind):
        return True
    return name == "label" and is_list(table, name, floats=True)


def count_columns(dataset: object) -> dict[str, NDArray[Any]] | None:
    """Count tokens and loss tokens; None unless ids (and any labels and masks) are Arrow integer lists."""
    table = arrow_table(dataset)
    if table is None:
        return None
    table = table.select(visible_columns(dataset, table))
    if not is_list(table, "input_ids"):
        return None
    if any(name in table.column_names and not is_list(table, name) for name in ("labels", "attention_mask")):
        return None
    lengths, _, wrong, most = _facts(table, "input_ids", lambda values: (values < 0) | (values > MOST_ID))
    loss_tokens = np.maximum(lengths - 1, 0)
    if "labels" in table.column_names:
        found, loss_tokens, bad, _ = _facts(
            table,
            "labels",
            lambda values: ((values < 0) & (values != IGNORE_INDEX)) | (values > MOST_ID) | wrapped(values),
        )
        wrong = wrong | bad | (found != lengths)
    if "attention_mask" in table.column_names:
        found, _, bad, _ = _facts(table, "attention_mask", lambda values: values != 1)
        wrong = wrong | bad | (found != lengths)
    lengths[wrong], loss_tokens[wrong], most[wrong] = 0, 0, -1  # a bad row counts as empty
    lengths, loss_tokens, wrong, most = (
        visible(dataset, column) for column in (lengths, loss_tokens, wrong, most)
    )
    at = int(most.argmax())
    return {
        "lengths": lengths,
        "loss_tokens": loss_tokens,
        "largest": np.array([most[at], at]),
        "bad": np.flatnonzero(wrong),
    }


def without_pixels(dataset: Any) -> Any:
    """Drop each pixel column of a Hugging Face dataset that has a grid column with the numbers of patches."""
    if arrow_table(dataset) is None or isinstance(dataset, ColumnRows):
        return dataset
    pairs = zip(GRIDS, PIXELS, strict=True)
    both = [pixels for grid, pixels in pairs if {grid, pixels} <= set(dataset.column_names)]
    return dataset.remove_columns(both)


def _facts(table: Any, name: str, is_wrong: Callable[[NDArray[Any]], NDArray[np.bool_]]) -> Facts:
    """Return for each row of a list column: length, targets, whether a value is wrong, largest value."""
    pc = require("pyarrow.compute", feature="reading Arrow columns")
    nothing = np.empty(0, np.int64)
    parts: list[Facts] = [(nothing, nothing, np.empty(0, bool), nothing)]
    for chunk in table.column(name).chunks:
        values = chunk.flatten()
        lengths = np.asarray(pc.fill_null(pc.list_value_length(chunk), 0)).astype(np.int64)
        total, rows = len(lengths), np.flatnonzero(lengths)
        targets, wrong, most = np.zeros(total, np.int64), np.zeros(total, bool), np.full(total, -1, np.int64)
        if len(rows):
            begins = (np.cumsum(lengths) - lengths)[rows]
            array = np.asarray(values.fill_null(0) if values.null_count else values)
            bad, learned = is_wrong(array), array != IGNORE_INDEX
            if values.null_count:
                bad |= np.asarray(values.is_null())
            learned[begins] = False  # the first token of a row is not a target
            targets[rows] = np.add.reduceat(learned, begins, dtype=np.int64)
            wrong[rows] = np.logical_or.reduceat(bad, begins)
            most[rows] = np.maximum.reduceat(array, begins)
        parts.append((lengths, targets, wrong, most))
    lengths, targets, wrong, most = (np.concatenate(column) for column in zip(*parts, strict=True))
    return lengths, targets, wrong, most
