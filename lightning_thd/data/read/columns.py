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

_READ = tuple(name for name in names("token", "weight", "boundary", "type") if name != "mm_token_type_ids")
_NUMBERS = frozenset(("input_ids", "labels", *names("weight", "label")))
_MEDIA = (*names("media"), "mm_token_type_ids")  # with these, rows are read through the dataset


def as_rows(dataset: MapDataset) -> MapDataset:
    """Return the rows of a Hugging Face dataset of ids as ``ColumnRows`` if possible, else the dataset."""
    table = arrow_table(dataset)
    if table is None or isinstance(dataset, ColumnRows):
        return dataset
    columns = visible_columns(dataset, table)
    labels = [name for name in columns if is_label(table, name)]
    known = [name for name in columns if name in _READ or name in labels]
    if "next_label" in columns or not all(
        is_list(table, name, floats=name == "weights") for name in known if name not in labels
    ):
        return dataset
    media = [name for name in columns if name in _MEDIA]
    refuse_keys(columns)
    if other := [name for name in columns if name not in (*known, *_MEDIA)]:
        lists = [name for name in other if is_list(table, name) and name != "special_tokens_mask"]
        if lists:  # they may mark where sequences begin
            raise ValueError(
                f"The column {lists[0]!r} holds lists of integers, but is not read. Drop or rename it."
            )
        if images := [x for x in other if x in names("raw") and table[x].null_count < len(table)]:
            raise ValueError(f"The column {images[0]!r} beside input_ids is not read. Give pixel_values.")
        rank_zero_info(f"Columns left out, because they hold no ids, labels or images: {', '.join(other)}.")
    if media:
        return cast("MapDataset", cast("Any", dataset).select_columns([*known, *media]))
    return cast("MapDataset", ColumnRows(dataset, known))


def hold_ids(files: list[SourceFile], text_key: str) -> bool:
    """Return True if all files have ids, False at the first that has text or chats instead."""
    schemas = [
        open_parquet(file).schema_arrow if file.suffix == ".parquet" else map_arrow(file).schema
        for file in files
    ]
    columns = [{name: schema.field(name).type for name in schema.names} for schema in schemas]
    for file, found in zip(files, columns, strict=True):
        if "input_ids" not in found:
            if kind_of(dict.fromkeys(found, ""), text_key) is not None:
                return False
            raise ValueError(f"{file.name} has the columns {list(found)}, but neither 'input_ids' nor text.")
        if found != columns[0]:  # the package datasets would fill in missing columns
            both = [{name: str(kind) for name, kind in each.items()} for each in (found, columns[0])]
            raise ValueError(
                f"{file.name} and {files[0].name} have different columns: {both[0]}, and {both[1]}. "
                "Give files with the same columns."
            )
    return True


def load_columns(files: list[SourceFile], cache_dir: str | Path | None) -> Any:
    """Open Parquet or Arrow files as one Hugging Face dataset, mapped into memory from the cache."""
    full = [file for file in files if sum(part_sizes(file))]  # the package datasets refuses empty files
    if not full:
        raise ValueError(f"{files[0].name} has no rows. Give at least one sequence.")
    try:
        return _load("parquet" if files[0].suffix == ".parquet" else "arrow", full, cache_dir)
    except Exception:  # the error names no file, but reading again raises one that does
        for chunk in file_chunks(full):
            deque(chunk(), maxlen=0)
        raise


def _load(kind: str, files: list[SourceFile], cache_dir: str | Path | None, **options: Any) -> Any:
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
        csv.field_size_limit(2**31 - 1)  # documents may exceed the default of 128 KiB
        with file.path.open(encoding="utf-8-sig", newline="") as opened:
            reader, empty = csv.reader(opened, delimiter=separator, strict=True), True
            names = [name or f"Unnamed: {i}" for i, name in enumerate(next(reader, []))]  # as pandas does
            for row in filter(None, reader):
                empty = False
                if len(row) != len(names):  # pandas would shift the cells, or pad the row
                    raise csv.Error(f"line {reader.line_num}: {len(row)} cells, but {len(names)} columns")
        if empty:
            return []
        if len(names) == 1 and (other := next((sign for sign in ";\t|" if sign in names[0]), None)):
            raise ValueError(
                f"{file.name}: the first line, {names[0]!r:.60}, is one column, because cells are separated "
                f"by {separator!r} and not by {other!r}. Write the file again, or give .jsonl."
            )
        features = datasets.Features({name: datasets.Value("string") for name in names})
        table = {"sep": separator, "features": features, "keep_default_na": False}
        rows = _load("csv", [file], cache_dir, **table)
    except (UnicodeDecodeError, csv.Error, datasets.exceptions.DatasetGenerationError) as err:
        raise ValueError(
            f"{file.name} is not a table ({err.__cause__ or err}). "
            "Quote cells that hold a separator, or give .jsonl."
        ) from err
    if len(set(names)) < len(names):
        raise ValueError(f"{file.name}: the first line names a column twice: {names}. Rename one.")
    parts = [range(len(rows))[at : at + CHUNK_ROWS] for at in range(0, len(rows), CHUNK_ROWS)]
    return [partial(_table_rows, file.name, rows, part, _NUMBERS - {text_key}) for part in parts]


def _table_rows(name: str, rows: Any, which: range, numbers: frozenset[str]) -> Iterator[Placed]:
    for i in which:
        row = without_nulls(rows[i])
        yield f"{name}, row {i}", {key: _number(x) if key in numbers else x for key, x in row.items()}


def _number(cell: str) -> Any:
    """Parse a cell that is a JSON number, boolean or list, such as ``[1, 0]``; any other cell stays text."""
    found = parse_json(cell)
    return found if isinstance(found, int | float | list) else cell
