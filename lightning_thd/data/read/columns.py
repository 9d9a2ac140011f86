"""Parquet and Arrow files, or Hugging Face datasets, of ids -> rows as views of their columns."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any, cast

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_thd._imports import require
from lightning_thd.batch import check_modalities
from lightning_thd.data.read.conversations import kind_of
from lightning_thd.data.read.files import SourceFile
from lightning_thd.data.read.records import part_sizes, read_part
from lightning_thd.data.store.arrays import cache_folder
from lightning_thd.data.store.columns import ColumnRows, arrow_table, is_list, map_arrow, visible_columns
from lightning_thd.data.store.lock import build_once
from lightning_thd.data.store.measure import MapDataset

# What is read of files and datasets of ids: one value a token, and what tells the sequences of packs apart.
_READ = (
    *("input_ids", "labels", "lengths", "seq_lengths", "cu_seqlens", "cu_seqlens_padded", "position_ids"),
    *("attention_mask", "token_type_ids", "weights"),
)
# Inputs of vision models, which a dataset of Python objects or tensors carries beside its ids.
_MEDIA = ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "mm_token_type_ids")


def as_rows(dataset: MapDataset) -> MapDataset:
    """Read a Hugging Face dataset of ids by its columns; leave any other dataset as it is.

    Columns that hold no numbers for tokens or images are left out, which is said.
    """
    table = arrow_table(dataset)
    if table is None or isinstance(dataset, ColumnRows):
        return dataset
    columns = visible_columns(dataset, table)
    if "next_label" in columns or not all(
        is_list(table, name, floats=name == "weights") for name in columns if name in _READ
    ):
        return dataset
    known = [name for name in columns if name in _READ]
    media = [name for name in columns if name in _MEDIA]
    check_modalities(columns)
    if other := [name for name in columns if name not in (*_READ, *_MEDIA)]:
        rank_zero_info(f"The columns {', '.join(other)} are left out: they hold no ids, labels or images.")
    if media:
        return cast("MapDataset", cast("Any", dataset).select_columns([*known, *media]))
    return cast("MapDataset", ColumnRows(dataset, known))


def open_columns(
    files: list[SourceFile], *, text_key: str, cache_dir: str | Path | None
) -> MapDataset | None:
    """Open Parquet or Arrow files with a column of ids as one dataset; None where they hold text.

    Parquet is unpacked into an Arrow file in the cache, once, which is mapped into memory.

    Raises:
        ValueError: for columns with neither ids nor text, and files whose columns differ.
    """
    pa = require("pyarrow", feature=f"reading {files[0].suffix} files")
    arrow: list[SourceFile] = []
    keep: list[str] = []
    for file in files:
        names = _names(file)
        if "input_ids" not in names:
            if kind_of(dict.fromkeys(names, ""), text_key) is not None:
                return None
            raise ValueError(
                f"{file.name} has the columns {names} but no 'input_ids'. Rename the column of token ids, or "
                "name that of text with text_key."
            )
        if lost := [name for name in names if name in (*_MEDIA, "next_label")]:
            raise ValueError(
                f"{file.name} has the column {lost[0]!r} beside its ids, which files of columns cannot give "
                "to a model. Open it with datasets.load_dataset and pass that."
            )
        check_modalities(names)
        kept = [name for name in names if name in _READ]
        keep = keep or kept
        if set(kept) != set(keep):
            raise ValueError(
                f"{files[0].name} and others have different columns: {keep}, and {file.name} {kept}. "
                "Write them alike."
            )
        arrow.append(file if file.suffix == ".arrow" else _unpacked(file, keep, cache_dir))
    read = partial(_concatenated, tuple(arrow), tuple(keep))
    try:
        table = read()
    except (pa.ArrowInvalid, KeyError) as err:
        raise ValueError(
            f"{files[0].name} and others have different columns ({err}). Write them alike."
        ) from err
    bad = [name for name in table.column_names if not is_list(table, name, floats=name == "weights")]
    if bad:
        raise ValueError(
            f"{files[0].name}: the column {bad[0]!r} is of type {table.schema.field(bad[0]).type}. "
            "Write lists of integers, one a row."
        )
    return cast("MapDataset", ColumnRows(read, table.column_names))


def _concatenated(files: tuple[SourceFile, ...], names: tuple[str, ...]) -> Any:
    pa = require("pyarrow", feature="reading .arrow files")
    return pa.concat_tables([map_arrow(file.path, file.name).select(list(names)) for file in files])


def _names(file: SourceFile) -> list[str]:
    if file.suffix == ".arrow":
        return list(map_arrow(file.path, file.name).column_names)
    part_sizes(file)  # says what is wrong with a damaged file
    pq = require("pyarrow.parquet", feature="reading .parquet files")
    return list(pq.ParquetFile(file.path).schema_arrow.names)


def _unpacked(file: SourceFile, keep: list[str], cache_dir: str | Path | None) -> SourceFile:
    pa = require("pyarrow", feature="reading .parquet files")
    pq = require("pyarrow.parquet", feature="reading .parquet files")
    digest = hashlib.sha256(json.dumps([file.content, keep]).encode()).hexdigest()[:24]
    folder = cache_folder(cache_dir) / f"columns-{digest}"

    def build(place: Path) -> None:
        schema = pq.ParquetFile(file.path).schema_arrow
        kept = pa.schema([schema.field(name) for name in keep])
        with pa.ipc.new_file(str(place / "data.arrow"), kept) as writer:
            for part in range(len(part_sizes(file))):
                for batch in read_part(file, part, keep):
                    writer.write_table(pa.Table.from_batches([batch]).select(keep).cast(kept))

    if not (folder / "data.arrow").is_file():
        build_once(folder, build)
    return SourceFile(folder / "data.arrow", file.name, ".arrow", file.content)
