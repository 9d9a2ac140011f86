"""Sequences of any source -> a Parquet or Arrow file of rows that are packs: ``lightning-thd pack IN OUT``.

Packing offline pays where a trainer that cannot plan reads the file, or where ready packs are compared;
``THDDataModule`` packs by itself in less time than it takes to read such a file, and reads it too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from lightning_thd._imports import require
from lightning_thd.alignment import Alignment
from lightning_thd.batch import THDBatch
from lightning_thd.batch.samples import check_attention_mask
from lightning_thd.data.planning import counts_of
from lightning_thd.data.read.conversations import Records
from lightning_thd.data.read.encode import Tokenizer
from lightning_thd.data.read.sources import Opener, Source
from lightning_thd.data.read.tokenize import Engine
from lightning_thd.data.sets import DataSet, open_set
from lightning_thd.data.shards import write_shards
from lightning_thd.data.store.columns import MOST_ID
from lightning_thd.data.store.index import Empty
from lightning_thd.data.store.measure import OnError, media_names
from lightning_thd.packing import PackPlanner, Packs, Spans
from lightning_thd.packing.entries import Oversize
from lightning_thd.packing.lengths import check_count

Boundaries = Literal["lengths", "cu_seqlens", "position_ids"]

_GROUP = 256  # packs written as one row group
_LOOK_AT = 1000  # sequences without a masked label that are asked whether they have labels


def pack_file(
    source: Source,
    out: str | Path,
    *,
    capacity: int,
    boundaries: Boundaries = "lengths",
    multiple: int = 1,
    oversize: Oversize = "error",
    empty: Empty = "error",
    on_error: OnError = "raise",
    max_errors: int | None = 1000,
    window: int = 65_536,
    seed: int = 0,
    tokenizer: Tokenizer | str | None = None,
    text_key: str = "text",
    append_eos: bool = True,
    records: Records = "auto",
    shard_packs: int = 16_384,
    engine: Engine = "local",
    num_workers: int = 0,
    cache_dir: str | Path | None = None,
    progress: bool = False,
) -> dict[str, int]:
    """Pack the sequences of a source once, and write the packs into files.

    Args:
        source: whatever ``THDDataModule`` takes, but a mixture.
        out: a ``.parquet`` or ``.arrow`` file, written in one step, an existing one is replaced; or a folder,
            which gets shards and ``manifest.json``, and is gone on with where a killed run stopped.
        capacity: most slots of a pack.
        boundaries: the column beside ``input_ids`` (and ``labels``) that tells sequences apart.
        multiple: pad every sequence to a multiple of this; ``cu_seqlens_padded`` is written beside then.
        oversize: what becomes of a sequence longer than ``capacity``. ``split`` loses the target at each
            cut, because a row of its own has no room for a label beyond its end.
        empty: what becomes of a sequence without tokens.
        on_error: what becomes of a bad record, see ``THDDataModule``.
        max_errors: likewise.
        window: sequences packed together.
        seed: of the order.
        tokenizer: of text, see ``THDDataModule``.
        text_key: likewise.
        append_eos: likewise.
        records: likewise.
        shard_packs: packs of a shard, where ``out`` is a folder.
        engine: what tokenises, and writes the shards of a folder: ``"local"`` or ``"ray"``.
        num_workers: processes that tokenise and count.
        cache_dir: where tokenised text is kept.
        progress: show bars.

    Returns:
        ``packs``, ``sequences``, ``real_tokens``, ``slots``, and the counts of the policies:
        ``empty``, ``dropped``, ``truncated``, ``split``, ``own_pack``, ``tokens_lost``, perhaps ``skipped``.

    Raises:
        ValueError: for another suffix, sequences with more than tokens and labels, padding that
            ``boundaries`` cannot express, a folder that holds packs of other data or settings, and what the
            policies call an error.
    """
    out = Path(out)
    _check(out, boundaries, multiple)
    check_count("shard_packs", shard_packs, "It is the number of packs of a file.")
    opener = Opener(
        tokenizer=tokenizer,
        text_key=text_key,
        append_eos=append_eos,
        records=records,
        on_error=on_error,
        max_errors=max_errors,
        engine=engine,
        cache_dir=cache_dir,
        num_workers=num_workers,
        progress=progress,
    )
    data = open_set("pack", source, opener, empty=empty)
    align = Alignment(sequence_multiple=multiple, total_multiple=multiple) if multiple > 1 else None
    planner = PackPlanner(
        data.index.lengths,
        capacity,
        global_batch=Packs(1),  # a step of many would spread them evenly
        align=align,
        window=window,
        oversize=oversize,
        seed=seed,
    )
    packer = Packer(planner=planner, data=data, boundaries=boundaries, align=align, labels=_has_labels(data))
    if out.suffix in (".parquet", ".arrow"):
        counts = packer.write(out, 0, len(planner), progress=progress)
    else:
        counts = write_shards(packer, out, shard_packs, engine=engine, progress=progress)
    return {**counts, **counts_of(data, planner)}


def _check(out: Path, boundaries: str, multiple: int) -> None:
    if out.suffix not in (".parquet", ".arrow", ""):
        raise ValueError(
            f"{out}: packs are written as .parquet or .arrow, or as shards into a folder. Give it such a "
            "name."
        )
    if boundaries not in get_args(Boundaries):
        raise ValueError(f"boundaries={boundaries!r}: choose one of {', '.join(get_args(Boundaries))}.")
    if multiple > 1 and boundaries == "position_ids":
        raise ValueError(
            f"boundaries='position_ids' cannot tell padding from tokens, but multiple={multiple} pads. "
            "Choose 'cu_seqlens' or 'lengths'."
        )


def _refuse_lost(sample: Mapping[str, Any], i: int, *, labels: bool) -> None:
    """Refuse what a file of packs has no room for: who trains on it would train on something else."""
    length = len(sample["input_ids"])
    names = [*media_names(sample), *(name for name in ("weights", "next_label") if name in sample)]
    names += [name for name in ("token_type_ids", "mm_token_type_ids") if np.any(sample.get(name, 0))]
    if not np.array_equal(np.asarray(sample.get("position_ids", range(length))), np.arange(length)):
        names.append("position_ids")
    if names:
        raise ValueError(
            f"Sequence {i} carries {', '.join(names)}: only tokens and labels can be packed offline. Pack "
            "while training, by THDDataModule."
        )
    if "attention_mask" in sample:
        check_attention_mask(sample, length, i)
    if not labels and "labels" in sample:
        own, ids = np.asarray(sample["labels"]), np.asarray(sample["input_ids"])
        if (own[1:] != ids[1:]).any():
            raise ValueError(
                f"Sequence {i} has labels of its own and the first {_LOOK_AT} have none. Give all, or none, "
                "labels."
            )


def _has_labels(data: DataSet) -> bool:
    """Return whether any sequence has labels: all packs then get the column."""
    loss, lengths = np.asarray(data.index.loss_tokens), np.asarray(data.index.lengths)
    if (loss != np.maximum(lengths - 1, 0)).any():
        return True
    return any("labels" in data.dataset[i] for i in range(min(len(data.dataset), _LOOK_AT)))


@dataclass(frozen=True, kw_only=True)
class Packer:
    """Writes the packs of a plan as rows of a Parquet or Arrow file.

    Attributes:
        planner: of one pack a step.
        data: that is packed.
        boundaries: the column that tells sequences apart.
        align: of padded lengths; None pads nothing.
        labels: whether rows have the column, with labels of their own or the ids.
    """

    planner: PackPlanner
    data: DataSet
    boundaries: Boundaries
    align: Alignment | None
    labels: bool

    def write(self, out: Path, first: int, last: int, *, progress: bool = False) -> dict[str, int]:
        """Write the packs ``first`` to ``last`` of the plan atomically, and count them."""
        pa = require("pyarrow", feature="writing packs")
        counts = dict.fromkeys(("packs", "sequences", "real_tokens", "slots"), 0)
        schema = pa.schema([(name, pa.list_(pa.int32())) for name in self._names])
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = out.with_name(f".{out.name}.unfinished")
        try:
            with (
                _writer(unfinished, out.suffix, schema) as writer,
                tqdm(total=last - first, desc="Packing", unit="pack", disable=not progress) as bar,
            ):
                for begin in range(first, last, _GROUP):
                    rows = [self._row(k, counts) for k in range(begin, min(begin + _GROUP, last))]
                    writer.write_table(pa.table({n: [row[n] for row in rows] for n in self._names}, schema))
                    bar.update(len(rows))
            unfinished.replace(out)
        finally:
            unfinished.unlink(missing_ok=True)
        return counts

    @property
    def _names(self) -> list[str]:
        padded = ["cu_seqlens_padded"] if self.align is not None else []
        return ["input_ids", *(["labels"] if self.labels else []), self.boundaries, *padded]

    def _row(self, k: int, counts: dict[str, int]) -> dict[str, NDArray[np.int32]]:
        [spans] = self.planner.step(0, k, 1).microbatches(0)
        pieces = zip(spans.index.tolist(), spans.start.tolist(), spans.stop.tolist(), strict=True)
        samples = [self.data.index.sample(self.data.dataset, *piece) for piece in pieces]
        for i, sample in zip(spans.index.tolist(), samples, strict=True):
            _refuse_lost(sample, i, labels=self.labels)
        batch = THDBatch.collate([{"input_ids": sample["input_ids"]} for sample in samples], align=self.align)
        row = {"input_ids": _as_int32(batch.input_ids.numpy(), spans, samples)}
        if self.labels:
            labels = [{"input_ids": np.asarray(s.get("labels", s["input_ids"])) + _SHIFT} for s in samples]
            row["labels"] = THDBatch.collate(labels, align=self.align).input_ids.numpy() - _SHIFT
        real = len(batch.lengths)
        if self.boundaries == "position_ids":
            row["position_ids"] = batch.position_ids.numpy()
        elif self.boundaries == "lengths":
            row["lengths"] = np.array(batch.lengths, np.int32)
        else:
            row["cu_seqlens"] = batch.cu_seqlens.numpy()[: real + 1]
        if self.align is not None:
            row["cu_seqlens_padded"] = batch.cu_seqlens_padded.numpy()[: real + 1]
        counts["packs"] += 1
        counts["sequences"] += real
        counts["real_tokens"] += sum(batch.lengths)
        counts["slots"] += len(row["input_ids"])
        return {name: values.astype(np.int32) for name, values in row.items()}


_SHIFT = 100  # labels from -100 become ids from 0, and padding, an id of 0, a label of -100


def _as_int32(ids: NDArray[Any], spans: Spans, samples: list[dict[str, Any]]) -> NDArray[Any]:
    if ids.max(initial=0) > MOST_ID:
        worst = next(i for i, s in enumerate(samples) if np.max(s["input_ids"]) > MOST_ID)
        raise ValueError(
            f"Sequence {int(spans.index[worst])} has the token id "
            f"{int(np.max(samples[worst]['input_ids']))}, "
            f"more than {MOST_ID}, the largest that a file of packs holds. Mend the data."
        )
    return ids


def _writer(path: Path, suffix: str, schema: Any) -> Any:
    if suffix == ".arrow":
        return require("pyarrow", feature="writing packs").ipc.new_stream(str(path), schema)
    return require("pyarrow.parquet", feature="writing packs").ParquetWriter(path, schema)


def make_parser() -> argparse.ArgumentParser:
    """Describe the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="lightning-thd pack",
        description="Pack a data set once and write ready packs.",
        epilog="example: lightning-thd pack texts.jsonl packs.parquet --capacity 8192",
    )
    parser.add_argument(
        "source", nargs="+", help="files, folders, globs or addresses, as THDDataModule takes"
    )
    parser.add_argument("out", help="a .parquet or .arrow file, or a folder for shards and a manifest")
    parser.add_argument("--capacity", type=int, required=True, help="most slots of a pack")
    parser.add_argument("--boundaries", choices=get_args(Boundaries), default="lengths")
    parser.add_argument("--multiple", type=int, default=1, help="pad each sequence to a multiple of this")
    parser.add_argument("--oversize", choices=get_args(Oversize), default="error")
    parser.add_argument("--empty", choices=get_args(Empty), default="error")
    parser.add_argument("--on-error", choices=get_args(OnError), default="raise")
    parser.add_argument("--max-errors", type=int, default=1000, help="most bad records with --on-error skip")
    parser.add_argument("--window", type=int, default=65_536, help="sequences packed together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", help="name or path of a Hugging Face tokenizer; UTF-8 bytes without")
    parser.add_argument("--text-key", default="text")
    parser.add_argument("--no-eos", dest="append_eos", action="store_false", help="do not append EOS")
    kinds = get_args(Records)
    parser.add_argument("--records", choices=kinds, default="auto", metavar="KIND", help=", ".join(kinds))
    parser.add_argument("--shard-packs", type=int, default=16_384, help="packs of a shard")
    parser.add_argument(
        "--engine", choices=get_args(Engine), default="local", help="what tokenises and writes"
    )
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--cache-dir", help="where tokenised text is kept")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``lightning-thd pack data.jsonl packs.parquet --capacity 8192``."""
    parser = make_parser()
    given = vars(parser.parse_args(arguments))
    as_json = given.pop("json")
    try:
        source = given.pop("source")
        source = source[0] if len(source) == 1 else source
        counts = pack_file(source, given.pop("out"), progress=sys.stderr.isatty(), **given)
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as err:
        parser.error(str(err))
    if as_json:
        sys.stdout.write(json.dumps({name: int(count) for name, count in counts.items()}) + "\n")
        return
    fill = counts["real_tokens"] / (counts["packs"] * given["capacity"])
    lost = "".join(f", {k.replace('_', ' ')} {n:,}" for k, n in list(counts.items())[4:] if n)
    sys.stdout.write(
        f"{counts['sequences']:,} sequences, {counts['real_tokens']:,} tokens in {counts['packs']:,} packs "
        f"of {given['capacity']:,} slots, {fill:.1%} full{lost}\n"
    )
