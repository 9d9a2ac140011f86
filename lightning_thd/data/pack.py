"""Sequences of any source -> a Parquet or Arrow file of rows that are packs: ``lightning-thd pack IN OUT``.

Packing offline pays where a trainer that cannot plan reads the file, or where ready packs are compared;
``THDDataModule`` packs by itself in less time than it takes to read such a file, and reads it too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from lightning_thd._imports import require
from lightning_thd.alignment import Alignment
from lightning_thd.batch import THDBatch
from lightning_thd.data.read.encode import Tokenizer
from lightning_thd.data.read.sources import Opener
from lightning_thd.data.store.index import Empty, MapDataset, SequenceIndex, build_index, media_names
from lightning_thd.packing import PackPlanner, Packs, Spans
from lightning_thd.packing.entries import Oversize

Boundaries = Literal["lengths", "cu_seqlens", "position_ids"]

_GROUP = 256  # packs written as one row group


def pack_file(
    source: MapDataset | str | Path,
    out: str | Path,
    *,
    capacity: int,
    boundaries: Boundaries = "lengths",
    multiple: int = 1,
    oversize: Oversize = "error",
    empty: Empty = "error",
    window: int = 65_536,
    seed: int = 0,
    tokenizer: Tokenizer | str | None = None,
    text_key: str = "text",
    append_eos: bool = True,
    num_workers: int = 0,
    cache_dir: str | Path | None = None,
    progress: bool = False,
) -> dict[str, int]:
    """Pack a source once and write the packs.

    Args:
        source: whatever ``THDDataModule`` takes.
        out: ``.parquet`` or ``.arrow``; written in one step, an existing file is replaced.
        capacity: most slots of a pack.
        boundaries: the column beside ``input_ids`` (and ``labels``) that tells sequences apart.
        multiple: pad every sequence to a multiple of this; ``cu_seqlens_padded`` is written beside then.
        oversize: what becomes of a sequence longer than ``capacity``. ``split`` loses the target at each
            cut, because a row of its own has no room for a label beyond its end.
        empty: what becomes of a sequence without tokens.
        window: sequences packed together.
        seed: of the order.
        tokenizer: of text, see ``THDDataModule``.
        text_key: likewise.
        append_eos: likewise.
        num_workers: processes that tokenise and count.
        cache_dir: where tokenised text is kept.
        progress: show bars.

    Returns:
        ``packs``, ``sequences``, ``real_tokens``, ``slots``, and the counts of the policies:
        ``empty``, ``dropped``, ``truncated``, ``split``, ``own_pack``, ``tokens_lost``.

    Raises:
        ValueError: for another suffix, sequences with images, padding that ``boundaries`` cannot express, and
            what the policies call an error.
    """
    out = Path(out)
    _check(out, boundaries, multiple)
    opener = Opener(
        tokenizer=tokenizer,
        text_key=text_key,
        append_eos=append_eos,
        cache_dir=cache_dir,
        num_workers=num_workers,
        progress=progress,
    )
    opened = opener.open(source)
    index = build_index(
        opened.dataset,
        empty=empty,
        num_workers=num_workers,
        progress=progress,
        key=opened.key,
        cache_dir=cache_dir,
    )
    if names := media_names(opened.dataset[0]):
        raise ValueError(f"Sequences carry {', '.join(names)}: only tokens can be packed offline.")
    if "weights" in opened.dataset[0]:
        raise ValueError("Sequences carry weights: packed files have no room for them. Pack while training.")
    align = Alignment(sequence_multiple=multiple, total_multiple=multiple) if multiple > 1 else None
    planner = PackPlanner(
        index.lengths,
        capacity,
        global_batch=Packs(1),  # a step of many would spread them evenly
        align=align,
        window=window,
        oversize=oversize,
        seed=seed,
    )
    counts = {"packs": 0, "sequences": 0, "real_tokens": 0, "slots": 0}
    _write(out, _counted(_tables(planner, opened.dataset, index, boundaries, align), counts))
    return {**counts, **planner.entries.counts}


def _check(out: Path, boundaries: str, multiple: int) -> None:
    if out.suffix not in (".parquet", ".arrow"):
        raise ValueError(f"{out}: packs are written as .parquet or .arrow. Give it such a name.")
    if boundaries not in get_args(Boundaries):
        raise ValueError(f"boundaries={boundaries!r}: choose one of {', '.join(get_args(Boundaries))}.")
    if multiple > 1 and boundaries == "position_ids":
        raise ValueError(
            f"boundaries='position_ids' cannot tell padding from tokens, but multiple={multiple} pads. "
            "Choose 'cu_seqlens' or 'lengths'."
        )


def _tables(
    planner: PackPlanner,
    dataset: MapDataset,
    index: SequenceIndex,
    boundaries: Boundaries,
    align: Alignment | None,
) -> Iterator[list[dict[str, Any]]]:
    for first in range(0, len(planner), _GROUP):
        steps = range(first, min(first + _GROUP, len(planner)))
        packs = [planner.step(0, k, 1).microbatches(0)[0] for k in steps]
        yield [_row(spans, dataset, index, boundaries, align) for spans in packs]


def _row(
    spans: Spans, dataset: MapDataset, index: SequenceIndex, boundaries: Boundaries, align: Alignment | None
) -> dict[str, Any]:
    pieces = zip(spans.index.tolist(), spans.start.tolist(), spans.stop.tolist(), strict=True)
    samples = [index.sample(dataset, *piece) for piece in pieces]
    batch = THDBatch.collate([{"input_ids": sample["input_ids"]} for sample in samples], align=align)
    row: dict[str, Any] = {"input_ids": batch.input_ids.numpy().astype(np.int32)}
    if any("labels" in sample for sample in samples):
        labels = [{"input_ids": np.asarray(s.get("labels", s["input_ids"])) + _SHIFT} for s in samples]
        row["labels"] = (THDBatch.collate(labels, align=align).input_ids.numpy() - _SHIFT).astype(np.int32)
    real = len(batch.lengths)
    if boundaries == "position_ids":
        row["position_ids"] = batch.position_ids.numpy().astype(np.int32)
    elif boundaries == "lengths":
        row["lengths"] = np.array(batch.lengths, np.int32)
    else:
        row["cu_seqlens"] = batch.cu_seqlens.numpy()[: real + 1]
    if align is not None:
        row["cu_seqlens_padded"] = batch.cu_seqlens_padded.numpy()[: real + 1]
    return row


_SHIFT = 100  # labels from -100 become ids from 0, and padding, an id of 0, a label of -100


def _counted(tables: Iterator[list[dict[str, Any]]], counts: dict[str, int]) -> Iterator[Any]:
    pa = require("pyarrow", feature="writing packs")
    for rows in tables:
        counts["packs"] += len(rows)
        for row in rows:
            counts["slots"] += len(row["input_ids"])
            if "lengths" in row:
                counts["sequences"] += len(row["lengths"])
                counts["real_tokens"] += int(row["lengths"].sum())
            elif "cu_seqlens" in row:
                counts["sequences"] += len(row["cu_seqlens"]) - 1
                counts["real_tokens"] += int(row["cu_seqlens"][-1])
            else:
                counts["sequences"] += int((row["position_ids"] == 0).sum())
                counts["real_tokens"] += len(row["position_ids"])
        yield pa.table({name: [row[name] for row in rows] for name in rows[0]})


def _write(out: Path, tables: Iterator[Any]) -> None:
    pa = require("pyarrow", feature="writing packs")
    import pyarrow.parquet as pq

    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.unfinished")
    try:
        first = next(tables)
        writer = (
            pq.ParquetWriter(unfinished, first.schema)
            if out.suffix == ".parquet"
            else pa.ipc.new_stream(str(unfinished), first.schema)
        )
        with writer:
            writer.write_table(first)
            for table in tables:
                writer.write_table(table.cast(first.schema))
        unfinished.replace(out)
    finally:
        unfinished.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: ``lightning-thd pack data.jsonl packs.parquet --capacity 8192``.

    Args:
        arguments: what follows the command's name; None takes them from the shell.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-thd pack", description="Pack a data set once and write ready packs."
    )
    parser.add_argument("source", help="JSONL, text, Parquet or Arrow file, a folder of text, a token store")
    parser.add_argument("out", help="a .parquet or .arrow file")
    parser.add_argument("--capacity", type=int, required=True, help="most slots of a pack")
    parser.add_argument("--boundaries", choices=get_args(Boundaries), default="lengths")
    parser.add_argument("--multiple", type=int, default=1, help="pad each sequence to a multiple of this")
    parser.add_argument("--oversize", choices=get_args(Oversize), default="error")
    parser.add_argument("--empty", choices=get_args(Empty), default="error")
    parser.add_argument("--window", type=int, default=65_536, help="sequences packed together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", help="name or path of a Hugging Face tokenizer; UTF-8 bytes without")
    parser.add_argument("--text-key", default="text")
    parser.add_argument("--no-eos", dest="append_eos", action="store_false", help="do not append EOS")
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--cache-dir", help="where tokenised text is kept")
    given = vars(parser.parse_args(arguments))
    try:
        counts = pack_file(given.pop("source"), given.pop("out"), progress=sys.stderr.isatty(), **given)
    except (ValueError, OSError, ModuleNotFoundError) as err:
        parser.error(str(err))
    fill = counts["real_tokens"] / (counts["packs"] * given["capacity"])
    lost = "".join(f", {k.replace('_', ' ')} {n:,}" for k, n in list(counts.items())[4:] if n)
    sys.stdout.write(
        f"{counts['sequences']:,} sequences, {counts['real_tokens']:,} tokens in {counts['packs']:,} packs "
        f"of {given['capacity']:,} slots, {fill:.1%} full{lost}\n"
    )
