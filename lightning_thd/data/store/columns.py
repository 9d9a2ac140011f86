"""A Hugging Face dataset -> its Arrow columns: lengths and label counts, with no Python object a token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_thd._imports import require
from lightning_thd.data.store.tokens import count_targets

IntArray = NDArray[np.int64]


def arrow_table(dataset: object) -> Any | None:
    """Return the Arrow table behind a ``datasets.Dataset``; None for anything else.

    A transform of the user's own decides what samples hold, so that the columns say nothing: None too.
    """
    table = getattr(getattr(dataset, "data", None), "table", None)
    if table is None or (getattr(dataset, "format", None) or {}).get("type") == "custom":
        return None
    return table


def visible(dataset: object, values: IntArray) -> IntArray:
    """Pick the rows that ``select``, ``shuffle`` and ``filter`` left, in their order."""
    indices = getattr(dataset, "_indices", None)
    return values if indices is None else values[np.asarray(indices.column(0))]


def _compute() -> Any:
    return require("pyarrow.compute", feature="reading Arrow columns")


def list_lengths(table: Any, name: str) -> IntArray:
    """Entries of every list of a column, int64 ``[rows]``; an absent list has none."""
    pc = _compute()
    lengths = pc.fill_null(pc.list_value_length(table.column(name)), 0)
    return np.asarray(lengths).astype(np.int64)


def lists(table: Any, name: str) -> Iterator[tuple[NDArray[np.integer], IntArray]]:
    """Give a column of lists of ints piece by piece: all values of some rows, and their lengths."""
    pc = _compute()
    for chunk in table.column(name).chunks:
        lengths = np.asarray(pc.fill_null(pc.list_value_length(chunk), 0)).astype(np.int64)
        yield np.asarray(chunk.flatten()), lengths


def is_list(table: Any, name: str) -> bool:
    """Say whether a column is there and holds lists of integers."""
    if name not in table.column_names:
        return False
    pt = require("pyarrow", feature="reading Arrow columns").types

    kind = table.schema.field(name).type
    of_lists = pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind)
    return bool(of_lists and pt.is_integer(kind.value_type))


def count_columns(dataset: object) -> tuple[IntArray, IntArray] | None:
    """Count tokens and loss tokens of every sequence by the columns ``input_ids`` and ``labels``.

    Returns:
        int64 ``[N]`` each; None where the dataset has no such columns.

    Raises:
        ValueError: when ids and labels of a row differ in number.
    """
    table = arrow_table(dataset)
    if table is None or not is_list(table, "input_ids"):
        return None
    lengths = list_lengths(table, "input_ids")
    if "labels" not in table.column_names:
        loss_tokens = np.maximum(lengths - 1, 0)
    elif is_list(table, "labels"):
        other = list_lengths(table, "labels")
        if (other != lengths).any():
            i = int(np.argmax(other != lengths))
            raise ValueError(
                f"Row {i} has {lengths[i]} input_ids but {other[i]} labels. "
                "Give one label a token, unshifted, with -100 where it is to be ignored."
            )
        parts = [count_targets(values, sizes) for values, sizes in lists(table, "labels")]
        loss_tokens = np.concatenate([np.empty(0, np.int64), *parts])
    else:
        return None
    return visible(dataset, lengths), visible(dataset, loss_tokens)
