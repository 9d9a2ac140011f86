"""Parquet and Arrow files, or Hugging Face datasets, of ids -> rows as views of their columns."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any, cast

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_thd._imports import require
from lightning_thd.batch.keys import names, refuse_keys
from lightning_thd.data.read.conversations import kind_of
from lightning_thd.data.read.files import SourceFile
from lightning_thd.data.read.records import map_arrow, open_parquet
from lightning_thd.data.store.cache import cached_folder
from lightning_thd.data.store.columns import (
    ColumnRows,
    arrow_table,
    is_label,
    is_list,
    visible_columns,
)
from lightning_thd.data.store.index import MapDataset

_READ = tuple(name for name in names("token", "weight", "boundary", "type") if name != "mm_token_type_ids")
_MEDIA = (*names("media"), "mm_token_type_ids")  # read from a dataset, whose samples hold tensors


def as_rows(dataset: MapDataset) -> MapDataset:
    """Read a Hugging Face dataset of ids by its columns; leave any other dataset as it is."""
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
        if lists:  # they may say where sequences begin
            raise ValueError(
                f"The column {lists[0]!r} holds lists of integers and is not read. If it marks where "
                "sequences of a row begin, rename it to lengths, cu_seqlens or position_ids; else drop it."
            )
        rank_zero_info(f"The columns {', '.join(other)} are left out: they hold no ids, labels or images.")
    if media:
        return cast("MapDataset", cast("Any", dataset).select_columns([*known, *media]))
    return cast("MapDataset", ColumnRows(dataset, known))


def hold_ids(files: list[SourceFile], text_key: str) -> bool:
    """Return whether Parquet or Arrow files have a column of ids; raise if they have no text either."""
    schemas = [
        open_parquet(file).schema_arrow if file.suffix == ".parquet" else map_arrow(file).schema
        for file in files
    ]
    columns = [{name: str(schema.field(name).type) for name in schema.names} for schema in schemas]
    for file, found in zip(files, columns, strict=True):
        if "input_ids" not in found:
            if kind_of(dict.fromkeys(found, ""), text_key) is not None:
                return False
            raise ValueError(
                f"{file.name} has the columns {list(found)} but no 'input_ids'. Rename the column of token "
                "ids, or name that of text with text_key."
            )
        if found != columns[0]:  # datasets would fill in what a file lacks
            raise ValueError(
                f"{files[0].name} and others have different columns: {columns[0]}, and {file.name} {found}. "
                "Write them alike."
            )
    return True


def load_columns(files: list[SourceFile], cache_dir: str | Path | None) -> Any:
    """Open Parquet or Arrow files as one Hugging Face dataset, mapped into memory from the cache."""
    datasets = require("datasets", feature=f"reading {files[0].suffix} files")
    # datasets knows files by name and time; the folder is named by their content.
    folder = cached_folder("columns", {"files": [file.content for file in files]}, cache_dir)
    return datasets.load_dataset(
        "parquet" if files[0].suffix == ".parquet" else "arrow",
        data_files=[glob.escape(str(file.path.resolve())) for file in files],
        split="train",
        cache_dir=str(folder),
    )
