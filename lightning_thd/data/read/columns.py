"""Columns of ids in files or Hugging Face datasets -> rows that view the columns; CSV tables -> records."""

from __future__ import annotations

import csv
import glob
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_thd._imports import require
from lightning_thd.batch.keys import names, refuse_keys
from lightning_thd.data.read.conversations import kind_of
from lightning_thd.data.read.files import SourceFile
from lightning_thd.data.read.records import (
    CHUNK_ROWS,
    Chunk,
    Placed,
    file_chunks,
    map_arrow,
    open_parquet,
    parse_json,
    part_sizes,
    without_nulls,
)
from lightning_thd.data.store.cache import cached_folder
from lightning_thd.data.store.columns import ColumnRows, arrow_table, is_label, is_list, visible_columns
from lightning_thd.data.store.index import MapDataset

# Columns of lists that are read beside ids.
_READ = tuple(name for name in names("token", "weight", "boundary", "type") if name != "mm_token_type_ids")
# Columns of a table of text whose cells are parsed as numbers.
_NUMBERS = frozenset(("input_ids", "labels", *names("weight", "label")))
# Columns with which rows are read through the dataset, which knows the shapes of their values.
_MEDIA = (*names("media"), "mm_token_type_ids")


def as_rows(dataset: MapDataset) -> MapDataset:
    """Return the rows of a Hugging Face dataset of ids as ``ColumnRows`` if possible, else the dataset."""
    table = arrow_table(dataset)
    if table is None or isinstance(dataset, ColumnRows):
        return dataset

    columns = visible_columns(dataset, table)
    labels = [name for name in columns if is_label(table, name)]
    per_token = [name for name in columns if name in _READ and name not in labels]
    are_lists = all(is_list(table, name, floats=name == "weights") for name in per_token)
    if "next_label" in columns or not are_lists:
        return dataset

    refuse_keys(columns)
    read = [name for name in columns if name in _READ or name in labels]
    other = [name for name in columns if name not in (*read, *_MEDIA)]
    if other:
        _refuse_lost(table, other)
        rank_zero_info(f"Columns left out, because they hold no ids, labels or images: {', '.join(other)}.")
    media = [name for name in columns if name in _MEDIA]
    if media:
        return cast("MapDataset", cast("Any", dataset).select_columns([*read, *media]))
    return cast("MapDataset", ColumnRows(dataset, read))


def _refuse_lost(table: Any, columns: list[str]) -> None:
    """Refuse columns that are not read, but hold lists of integers or images."""
    # Lists of integers may mark where sequences begin. The one that is let through is a tokenizer's.
    lists = [name for name in columns if is_list(table, name) and name != "special_tokens_mask"]
    if lists:
        raise ValueError(
            f"The column {lists[0]!r} holds lists of integers, but is not read. Drop or rename it."
        )
    images = [name for name in columns if name in names("raw") and table[name].null_count < len(table)]
    if images:
        raise ValueError(f"The column {images[0]!r} beside input_ids is not read. Give pixel_values.")


def hold_ids(files: list[SourceFile], text_key: str) -> bool:
    """Return True if all files have ids, False at the first that has text or chats instead."""
    types_of_files = [_column_types(file) for file in files]
    first = types_of_files[0]
    beside_ids = {name: "" for name in first if name != "input_ids"}
    if kind_of(beside_ids, text_key) is not None and _begins_with_null_ids(files[0]):
        return False  # as in other containers, the first record shows the kind

    for file, types in zip(files, types_of_files, strict=True):
        if "input_ids" not in types:
            if kind_of(dict.fromkeys(types, ""), text_key) is not None:
                return False
            raise ValueError(f"{file.name} has the columns {list(types)}, but neither 'input_ids' nor text.")
        if types != first:  # the package datasets would fill in missing columns
            texts = {name: str(kind) for name, kind in types.items()}
            texts_of_first = {name: str(kind) for name, kind in first.items()}
            raise ValueError(
                f"{file.name} and {files[0].name} have different columns: {texts}, and {texts_of_first}. "
                "Give files with the same columns."
            )
    return True


def _begins_with_null_ids(file: SourceFile) -> bool:
    """Return whether a Parquet or Arrow file has a column of ids, and a null in its first row."""
    if "input_ids" not in _column_types(file):
        return False
    if file.suffix == ".parquet":
        batches = open_parquet(file).iter_batches(batch_size=1, columns=["input_ids"])
    else:
        batches = iter(map_arrow(file).select(["input_ids"]).to_batches())
    first = next((batch for batch in batches if batch.num_rows), None)
    return first is not None and not first.column(0)[0].is_valid


def _column_types(file: SourceFile) -> dict[str, Any]:
    """Return the Arrow type of each column of a Parquet or Arrow file."""
    schema = open_parquet(file).schema_arrow if file.suffix == ".parquet" else map_arrow(file).schema
    return {name: schema.field(name).type for name in schema.names}


def load_columns(files: list[SourceFile], cache_dir: str | Path | None) -> Any:
    """Open Parquet or Arrow files as one Hugging Face dataset, mapped into memory from the cache."""
    full = [file for file in files if sum(part_sizes(file))]  # the package datasets refuses empty files
    if not full:
        raise ValueError(f"{files[0].name} has no rows. Give at least one sequence.")

    kind = "parquet" if files[0].suffix == ".parquet" else "arrow"
    try:
        return _load(kind, full, cache_dir)
    except Exception:  # the error names no file, but reading again raises one that does
        for chunk in file_chunks(full):
            deque(chunk(), maxlen=0)  # reads all rows and keeps none
        raise


def _load(kind: str, files: list[SourceFile], cache_dir: str | Path | None, **options: Any) -> Any:
    """Load files of one kind with ``datasets.load_dataset``, and keep its tables in our cache."""
    datasets = require("datasets", feature=f"reading {files[0].suffix} files")
    # The package datasets identifies files by name and time. Its folder here is named by their content.
    folder = cached_folder("columns", {"files": [file.content for file in files]}, cache_dir)
    paths = [glob.escape(str(file.path.resolve())) for file in files]
    return datasets.load_dataset(kind, data_files=paths, split="train", cache_dir=str(folder), **options)


def table_chunks(file: SourceFile, text_key: str, cache_dir: str | Path | None) -> list[Chunk]:
    """Cut a ``.csv`` or ``.tsv`` file, whose first line names the columns, into chunks of rows.

    Cells are text, and an empty cell is the empty string. Only cells under ``_NUMBERS`` are parsed.
    """
    datasets = require("datasets", feature=f"reading {file.suffix} files")
    separator = "\t" if file.suffix == ".tsv" else ","
    try:
        names, is_empty = _check_cells(file, separator)
        if is_empty:
            return []
        _refuse_other_separator(file, names, separator)
        rows = _load(
            "csv",
            [file],
            cache_dir,
            sep=separator,
            features=datasets.Features({name: datasets.Value("string") for name in names}),
            keep_default_na=False,  # pandas would take texts like "NA" for missing values
        )
    except (UnicodeDecodeError, csv.Error, datasets.exceptions.DatasetGenerationError) as err:
        raise ValueError(
            f"{file.name} is not a table ({err.__cause__ or err}). "
            "Quote cells that hold a separator, or give .jsonl."
        ) from err
    if len(set(names)) < len(names):
        raise ValueError(f"{file.name}: the first line names a column twice: {names}. Rename one.")

    all_rows = range(len(rows))
    chunks = [all_rows[start : start + CHUNK_ROWS] for start in range(0, len(rows), CHUNK_ROWS)]
    return [partial(_table_rows, file.name, rows, chunk, _NUMBERS - {text_key}) for chunk in chunks]


def _check_cells(file: SourceFile, separator: str) -> tuple[list[str], bool]:
    """Check that rows have equally many cells; return the column names, and whether there is no row."""
    csv.field_size_limit(2**31 - 1)  # documents may exceed the default of 128 KiB
    is_empty = True
    with file.path.open(encoding="utf-8-sig", newline="") as opened:
        reader = csv.reader(opened, delimiter=separator, strict=True)
        header = next(reader, [])
        names = [name or f"Unnamed: {i}" for i, name in enumerate(header)]  # as pandas does
        for row in filter(None, reader):
            is_empty = False
            if len(row) != len(names):  # pandas would shift the cells, or pad the row
                raise csv.Error(f"line {reader.line_num}: {len(row)} cells, but {len(names)} columns")
    return names, is_empty


def _refuse_other_separator(file: SourceFile, names: list[str], separator: str) -> None:
    """Raise if the only column has a name that looks like the names of several."""
    if len(names) != 1:
        return
    other = next((sign for sign in ";\t|" if sign in names[0]), None)
    if other is not None:
        raise ValueError(
            f"{file.name}: the first line, {names[0]!r:.60}, is one column, because cells are separated "
            f"by {separator!r} and not by {other!r}. Write the file again, or give .jsonl."
        )


def _table_rows(name: str, rows: Any, numbers_of_rows: range, parsed: frozenset[str]) -> Iterator[Placed]:
    """Yield rows of a table; cells under the keys ``parsed`` are numbers."""
    for i in numbers_of_rows:
        row = without_nulls(rows[i])
        yield f"{name}, row {i}", {key: _number(x) if key in parsed else x for key, x in row.items()}


def _number(cell: str) -> Any:
    """Parse a cell that is a JSON number, boolean or list, such as ``[1, 0]``; any other cell stays text."""
    parsed = parse_json(cell)
    return parsed if isinstance(parsed, int | float | list) else cell
