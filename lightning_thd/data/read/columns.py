"""Parquet and Arrow files, or Hugging Face datasets, of ids -> rows as views of their columns."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_thd._imports import require
from lightning_thd.batch.keys import names, refuse_keys
from lightning_thd.data.read.conversations import kind_of
from lightning_thd.data.read.files import SourceFile
from lightning_thd.data.read.records import open_parquet, part_sizes, read_part
from lightning_thd.data.store.cache import build_once, cached_folder
from lightning_thd.data.store.columns import (
    ColumnRows,
    arrow_table,
    is_label,
    is_list,
    map_arrow,
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
        _refuse_lists(table, other)
        rank_zero_info(f"The columns {', '.join(other)} are left out: they hold no ids, labels or images.")
    if media:
        return cast("MapDataset", cast("Any", dataset).select_columns([*known, *media]))
    return cast("MapDataset", ColumnRows(dataset, known))


def _refuse_lists(table: Any, names: list[str]) -> None:
    """Refuse lists of integers that are not read: they may say where sequences begin."""
    if lists := [name for name in names if is_list(table, name) and name != "special_tokens_mask"]:
        raise ValueError(
            f"The column {lists[0]!r} holds lists of integers and is not read. If it marks where sequences "
            "of a row begin, rename it to lengths, cu_seqlens or position_ids; else drop it."
        )


def open_columns(
    files: list[SourceFile], *, text_key: str, cache_dir: str | Path | None
) -> MapDataset | None:
    """Open Parquet or Arrow files with a column of ids as one dataset; None if they hold text."""
    keep: dict[str, str] = {}  # the columns that are read, with their types
    for file in files:
        empty = _empty_table(file)
        names = empty.column_names
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
        refuse_keys(names)
        kept = {
            name: str(empty.schema.field(name).type)
            for name in names
            if name in _READ or is_label(empty, name)
        }
        _refuse_lists(empty, [name for name in names if name not in kept])
        keep = keep or kept
        if kept != keep:
            raise ValueError(
                f"{files[0].name} and others have different columns: {keep}, and {file.name} {kept}. "
                "Write them alike."
            )
        for name, kind in kept.items():
            if not is_list(empty, name, floats=name == "weights") and not is_label(empty, name):
                raise ValueError(
                    f"{file.name}: the column {name!r} is of type {kind}. Write lists of integers, one a row."
                )
    arrow = [file if file.suffix != ".parquet" else _unpacked(file, list(keep), cache_dir) for file in files]
    return cast("MapDataset", ColumnRows(partial(_concatenated, tuple(arrow), tuple(keep)), list(keep)))


def _empty_table(file: SourceFile) -> Any:
    if file.suffix != ".parquet":
        return map_arrow(file.path, file.name).schema.empty_table()
    return open_parquet(file).schema_arrow.empty_table()


def _concatenated(files: tuple[SourceFile, ...], names: tuple[str, ...]) -> Any:
    pa = require("pyarrow", feature="reading .arrow files")
    return pa.concat_tables([map_arrow(file.path, file.name).select(list(names)) for file in files])


def _unpacked(file: SourceFile, keep: list[str], cache_dir: str | Path | None) -> SourceFile:
    """Return columns of a Parquet file as an Arrow file in the cache, which can be mapped into memory."""
    pa = require("pyarrow", feature="reading .parquet files")
    folder = cached_folder("columns", {"content": file.content, "columns": keep}, cache_dir)

    def build(place: Path) -> None:
        schema = open_parquet(file).schema_arrow
        kept = pa.schema([schema.field(name) for name in keep])
        with pa.ipc.new_file(str(place / "data.arrow"), kept) as writer:
            for part in range(len(part_sizes(file))):
                for batch in read_part(file, part, keep):
                    writer.write_table(pa.Table.from_batches([batch]).select(keep).cast(kept))

    if not (folder / "data.arrow").is_file():
        build_once(folder, build)
    return SourceFile(folder / "data.arrow", file.name, ".arrow", file.content)
