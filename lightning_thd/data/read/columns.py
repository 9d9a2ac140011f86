"""Parquet and Arrow files, or Hugging Face datasets, of ids -> rows as views of their columns."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from numpy.typing import NDArray

from lightning_thd._imports import require
from lightning_thd.batch.keys import names, refuse_keys
from lightning_thd.data.read.conversations import kind_of
from lightning_thd.data.read.files import SourceFile
from lightning_thd.data.read.records import part_sizes, read_part
from lightning_thd.data.store.cache import build_once, cache_folder
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
_LOOKED_AT = 32  # rows in which an ignored column is looked at


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
        refuse_bounds(table, other)
        rank_zero_info(f"The columns {', '.join(other)} are left out: they hold no ids, labels or images.")
    if media:
        return cast("MapDataset", cast("Any", dataset).select_columns([*known, *media]))
    return cast("MapDataset", ColumnRows(dataset, known))


def open_columns(
    files: list[SourceFile], *, text_key: str, cache_dir: str | Path | None
) -> MapDataset | None:
    """Open Parquet or Arrow files with a column of ids as one dataset; None if they hold text."""
    pa = require("pyarrow", feature=f"reading {files[0].suffix} files")
    arrow: list[SourceFile] = []
    keep: list[str] = []
    for file in files:
        found = _columns(file)
        if "input_ids" not in found:
            if kind_of(dict.fromkeys(found, ""), text_key) is not None:
                return None
            raise ValueError(
                f"{file.name} has the columns {found} but no 'input_ids'. Rename the column of token ids, or "
                "name that of text with text_key."
            )
        if lost := [name for name in found if name in (*_MEDIA, "next_label")]:
            raise ValueError(
                f"{file.name} has the column {lost[0]!r} beside its ids, which files of columns cannot give "
                "to a model. Open it with datasets.load_dataset and pass that."
            )
        refuse_keys(found)
        kept = [name for name in found if name in (*_READ, "label")]
        other = [name for name in found if name not in kept]
        if file.suffix != ".parquet":
            refuse_bounds(map_arrow(file.path, file.name), other)
        else:
            schema = require("pyarrow.parquet", feature="reading .parquet files").read_schema(file.path)
            lists = [name for name in other if is_list(schema.empty_table(), name)]  # text stays unread
            if lists and sum(part_sizes(file)[:1]):
                refuse_bounds(next(read_part(file, 0, ["input_ids", *lists])), lists)
        keep = keep or kept
        if set(kept) != set(keep):
            raise ValueError(
                f"{files[0].name} and others have different columns: {keep}, and {file.name} {kept}. "
                "Write them alike."
            )
        arrow.append(file if file.suffix != ".parquet" else _unpacked(file, keep, cache_dir))
    read = partial(_concatenated, tuple(arrow), tuple(keep))
    try:
        table = read()
    except (pa.ArrowInvalid, KeyError) as err:
        raise ValueError(
            f"{files[0].name} and others have different columns ({err}). Write them alike."
        ) from err
    names = [name for name in table.column_names if name != "label" or is_label(table, name)]
    bad = [
        name
        for name in names
        if not (is_list(table, name, floats=name == "weights") or is_label(table, name))
    ]
    if bad:
        raise ValueError(
            f"{files[0].name}: the column {bad[0]!r} is of type {table.schema.field(bad[0]).type}. "
            "Write lists of integers, one a row."
        )
    return cast("MapDataset", ColumnRows(read, names))


def refuse_bounds(rows: Any, ignored: list[str]) -> None:
    """Refuse an ignored integer column that looks like the boundaries of several sequences in a row."""
    head = rows.slice(0, _LOOKED_AT)
    sizes = [len(ids or ()) for ids in head.column("input_ids").to_pylist()]
    for name in ignored:
        if not is_list(head, name):
            continue
        looks = [
            _looks_like(np.array(values, np.int64), slots)
            for values, slots in zip(head.column(name).to_pylist(), sizes, strict=True)
            if values and slots > 2 and None not in values
        ]
        fits = set.intersection(*map(set, looks)) if looks else set()
        if any(row[form] for row in looks for form in fits):
            raise ValueError(
                f"The column {name!r} marks where sequences of a row begin, by its values, and is not "
                "read, so that they would see each other. Rename it to lengths, cu_seqlens or position_ids, "
                "whichever it holds, or drop it."
            )


def _looks_like(values: NDArray[np.int64], slots: int) -> dict[str, bool]:
    """Return the forms of boundaries that integers fit, each with whether it marks several sequences."""
    steps = np.diff(values)
    each = len(values) == slots
    found: dict[str, bool] = {}
    if not each and values.min() > 0 and values.sum() == slots:
        found["lengths"] = len(values) > 1
    if values[0] == 0 and (steps > 0).all():
        if values[-1] == slots:
            found["offsets"] = len(values) > 2
        elif values[-1] < slots and not each:
            found["starts"] = len(values) > 1
    if each and values[0] == 0 and ((steps == 1) | (values[1:] == 0)).all():
        # A mask of 0 and 1 counts up, too, but not to 2.
        found["positions"] = bool(values.max() > 1 and (values == 0).sum() > 1)
    if each and values[0] in (0, 1) and set(steps.tolist()) <= {0, 1}:
        found["numbers"] = bool(values[-1] - values[0] > 1 and 0 in steps)
    return found


def file_table(file: SourceFile, cache_dir: str | Path | None) -> Any:
    """Map all columns of a Parquet or Arrow file into memory; of Parquet an unpacked copy in the cache."""
    if file.suffix != ".arrow":
        file = _unpacked(file, _columns(file), cache_dir)
    return map_arrow(file.path, file.name)


def _concatenated(files: tuple[SourceFile, ...], names: tuple[str, ...]) -> Any:
    pa = require("pyarrow", feature="reading .arrow files")
    return pa.concat_tables([map_arrow(file.path, file.name).select(list(names)) for file in files])


def _columns(file: SourceFile) -> list[str]:
    if file.suffix != ".parquet":
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
