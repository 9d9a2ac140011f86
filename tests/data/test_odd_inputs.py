"""Inputs that people have, and that trained on wrong tokens without a word: read right now, or refused."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard

from lightning_thd import Packs, THDDataModule
from lightning_thd.data import ByteTokenizer
from lightning_thd.data.streams import Stream

Read = list[tuple[list[int], list[int]]]


def read(source: Any, cache: Path, **options: Any) -> Read:
    """Ids and targets of every sequence of an epoch, in the order of the data."""
    data = THDDataModule(source, capacity=512, cache_dir=cache / ".cache", **options)
    data.setup("fit")
    found: dict[int, tuple[list[int], list[int]]] = {}
    for step in data.train_steps():
        for batch in step.microbatches:
            columns = batch.unpack(batch.input_ids), batch.unpack(batch.targets)
            for i, ids, targets in zip(batch.sequence_ids, *columns, strict=True):
                found[i] = ids.tolist(), targets.tolist()
    return [found[i] for i in sorted(found)]


def texts(source: Any, cache: Path, **options: Any) -> list[str]:
    whole = {"oversize": "own_pack", **options}
    return [ByteTokenizer().decode(np.array(ids)) for ids, _ in read(source, cache, **whole)]


def lines(*records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


PACKED = {
    "gz": gzip.compress(b'{"text": "a"}\n' * 99),
    "bz2": bz2.compress(b'{"text": "a"}\n' * 99),
    "xz": lzma.compress(b'{"text": "a"}\n' * 99),
    "zst": zstandard.compress(b'{"text": "a"}\n' * 99),
}
UTF16 = "hello".encode("utf-16")
TEXTS: dict[str, tuple[str, str | bytes, list[str]]] = {
    "byte-order mark of text": ("a.txt", b"\xef\xbb\xbfhello", ["hello"]),
    "byte-order mark of lines": ("a.jsonl", b"\xef\xbb\xbf" + lines({"text": "a"}).encode(), ["a"]),
    "strings": ("a.json", '["a", "b"]', ["a", "b"]),
    "several members": ("a.jsonl.gz", gzip.compress(lines({"text": "a"}).encode()) * 2, ["a", "a"]),
    "capital suffix": ("A.JSONL", lines({"text": "a"}), ["a"]),
    "brackets in the name": ("a[1].jsonl", lines({"text": "a"}), ["a"]),
    "several members of zstandard": (
        "a.jsonl.zst",
        zstandard.compress(lines({"text": "a"}).encode()) + zstandard.compress(lines({"text": "b"}).encode()),
        ["a", "b"],
    ),
    "zeros behind a member": ("a.jsonl.gz", gzip.compress(lines({"text": "a"}).encode()) + b"\0" * 9, ["a"]),
    "padded xz": ("a.jsonl.xz", lzma.compress(lines({"text": "a"}).encode()) + b"\0" * 8, ["a"]),
    "blank lines": ("a.jsonl", "\n\n" + lines({"text": "a"}) + "\n", ["a"]),
}
IDS = {"input_ids": [1, 2, 3]}
REFUSED: dict[str, tuple[str, str | bytes, str]] = {
    **{
        f"{suffix} that is cut": (f"a.jsonl.{suffix}", packed[:-9], "damaged, it cannot be unpacked")
        for suffix, packed in PACKED.items()
    },
    **{
        f"{suffix} with more behind": (
            f"a.jsonl.{suffix}",
            packed + b"junk",
            "damaged, it cannot be unpacked",
        )
        for suffix, packed in PACKED.items()
    },
    "a mask of the loss": ("a.jsonl", lines({**IDS, "loss_mask": [0, 0, 1]}), "carry 'loss_mask', which is"),
    "segments": ("a.jsonl", lines({**IDS, "segment_ids": [0, 0, 1]}), "sequences of one row would see each"),
    "a label of -1": ("a.jsonl", lines({**IDS, "labels": [-1, 2, 3]}), "line 1: the record has the label"),
    "Latin-1 text": ("a.txt", b"caf\xe9", r"a.txt: not UTF-8 \(byte 0xe9 at 3\). Write it again"),
    "Latin-1 lines": ("a.jsonl", b'{"text": "a"}\n{"text": "caf\xe9"}\n', "line 2: not UTF-8"),
    "UTF-16 without a mark": ("a.txt", UTF16[2:], "a null byte at 1, so it is no text"),
    "half a pair": ("a.jsonl", '{"text": "a\\ud800"}\n', "line 1: .*surrogates not allowed"),
    "lines without a suffix": ("lines", lines({"text": "a"}), "holds JSON objects, a line each. Name it"),
    "trailing comma": ("a.jsonl", '{"text": "a"},\n', "line 1: not JSON"),
    "text that is null": ("a.jsonl", lines({"text": None}), "no string under the key 'text' but a NoneType"),
    "padding": ("a.jsonl", lines({**IDS, "attention_mask": [1, 1, 0]}), "an attention_mask of shape .* that"),
    "weights": ("a.jsonl", lines({**IDS, "weights": [1, 1, 0]}), "weights beside input_ids: .* Write"),
    "packs": ("a.jsonl", lines({**IDS, "position_ids": [0, 1, 0]}), "position_ids beside input_ids"),
    "lengths": ("a.jsonl", lines({**IDS, "lengths": [1, 2]}), "lengths beside input_ids"),
    "labels later": ("a.jsonl", lines(IDS, {**IDS, "labels": [1, 2, 3]}), "line 2: it has labels, .* Give"),
    "labels first": ("a.jsonl", lines({**IDS, "labels": [1, 2, 3]}, IDS), "line 2: it has none, .* Give"),
    "bools": ("a.jsonl", '{"input_ids": [true, 7]}\n', "input_ids holds True or False among its numbers"),
}


def write(folder: Path, name: str, content: str | bytes) -> Path:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


@pytest.mark.parametrize("case", TEXTS)
def test_text_is_read_as_it_is_meant(case: str, tmp_path: Path) -> None:
    name, content, wanted = TEXTS[case]
    assert texts(write(tmp_path, name, content), tmp_path) == wanted


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_train_on_something_else_is_refused(case: str, tmp_path: Path) -> None:
    name, content, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        read(write(tmp_path, name, content), tmp_path)


def test_a_file_that_is_named_twice_is_said(tmp_path: Path) -> None:
    file = write(tmp_path, "a.jsonl", lines({"text": "a"}))
    (tmp_path / "b.jsonl").symlink_to(file)
    for source in ([file, file], [str(tmp_path / "a*.jsonl"), str(file)], tmp_path):
        with pytest.warns(UserWarning, match=r"a\.jsonl is named twice, also by a link, so its"):
            assert texts(source, tmp_path) == ["a", "a"]


def _parquet(folder: Path, **columns: Any) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = folder / f"{len(list(folder.glob('*.parquet')))}.parquet"
    pq.write_table(pa.table(columns), file)
    return file


@pytest.mark.parametrize("order", [1, -1])
def test_files_of_which_some_have_labels_are_refused(tmp_path: Path, order: int) -> None:
    tables: list[dict[str, Any]] = [{"input_ids": [[1, 2]], "labels": [[-100, 2]]}, {"input_ids": [[3, 4]]}]
    for columns in tables[::order]:
        _parquet(tmp_path, **columns)
    with pytest.raises(ValueError, match=r"different columns: .*'labels'.* Write them alike"):
        read(tmp_path, tmp_path)


def test_lists_of_every_kind_of_arrow(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    kinds = [pa.large_list(pa.int64()), pa.list_(pa.int32(), 2), pa.list_(pa.int8()), pa.list_(pa.uint64())]
    for k, kind in enumerate(kinds):
        folder = tmp_path / str(k)
        folder.mkdir()
        file = _parquet(folder, input_ids=pa.array([[1, 2], [3, 4]], kind))
        assert [ids for ids, _ in read(file, tmp_path)] == [[1, 2], [3, 4]]


def _datasets() -> dict[str, Callable[[], Any]]:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict(
        {"input_ids": [[1, 2], [3, 4, 5], [6]], "labels": [[-100, 2], [3, -100, 5], [6]]}
    )
    return {
        "selection": lambda: table.select([2, 0]),
        "slice": lambda: table.select(range(1, 3)),
        "filter": lambda: table.filter(lambda row: len(row["input_ids"]) > 1),
        "shuffle": lambda: table.shuffle(seed=3),
        "joined": lambda: datasets.concatenate_datasets([table.select([2]), table.select(range(2))]),
        "torch": lambda: table.with_format("torch"),
        "hidden labels": lambda: table.with_format("numpy", columns=["input_ids"]),
        "shown labels": lambda: table.with_format("torch", columns=["input_ids"], output_all_columns=True),
        "next label": lambda: table.add_column("next_label", [7, 8, 9]),
        "transform": lambda: table.with_transform(
            lambda rows: {"input_ids": [[9, 8] for _ in rows["input_ids"]]}
        ),
        "subset": lambda: torch.utils.data.Subset(table, [2, 1]),
        "concatenated": lambda: torch.utils.data.ConcatDataset([table.select([1]), table.select([0])]),
    }


VIEWS = ("selection", "slice", "filter", "shuffle", "joined", "torch", "hidden labels", "shown labels")


@pytest.mark.parametrize("name", [*VIEWS, "next label", "transform", "subset", "concatenated"])
def test_views_of_datasets_give_what_their_samples_show(tmp_path: Path, name: str) -> None:
    view = _datasets()[name]()
    rows = []
    for i in range(len(view)):  # sample by sample, as a list would give them
        row = view[i]
        rows.append({key: value if np.ndim(value) == 0 else np.asarray(value) for key, value in row.items()})
    assert read(view, tmp_path) == read(rows, tmp_path)


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_shards_of_a_stream_that_are_cut_are_refused(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"a.jsonl.{suffix}"
    texts = [f"{k} {np.random.default_rng(k).bytes(40).hex()}" for k in range(300)]
    whole = lines(*({"text": text} for text in texts)).encode()
    packed = gzip.compress(whole) if suffix == "gz" else zstandard.compress(whole)
    file.write_bytes(packed)
    found = THDDataModule(Stream(str(file)), capacity=512, global_batch=Packs(1)).train_steps()
    assert sum(len(batch.sequence_ids) for step in found for batch in step.microbatches) == 300
    file.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ValueError, match=r"a\.jsonl.*reading stopped.* end(s|ed) before"):
        list(THDDataModule(Stream(str(file)), capacity=512, global_batch=Packs(1)).train_steps())


@pytest.mark.parametrize("name", ["loss_mask", "segment_ids", "shift_labels", "loss_weights"])
def test_masks_that_nobody_reads_are_refused_wherever_they_stand(tmp_path: Path, name: str) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")
    rows = [{"input_ids": np.array([1, 2, 3]), name: np.array([0, 0, 1])}]
    columns = {"input_ids": [[1, 2, 3]], name: [[0, 0, 1]]}
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    streamed = Stream(lambda: iter([{"input_ids": [1, 2, 3], name: [0, 0, 1]}]))
    for source in (rows, str(tmp_path / "a.parquet"), datasets.Dataset.from_dict(columns)):
        with pytest.raises(ValueError, match=f"carry '{name}', which is not read"):
            read(source, tmp_path)
    with pytest.raises(ValueError, match=f"carry '{name}', which is not read"):
        list(THDDataModule(streamed, capacity=64, global_batch=Packs(1)).train_steps())


@pytest.mark.parametrize("kind", ["dataset", "parquet", "arrow"])
def test_lists_of_integers_that_are_not_read_are_refused(tmp_path: Path, kind: str) -> None:
    """Other libraries have a name of their own each for where the sequences of a packed row begin."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")
    columns = {"input_ids": [[1] * 5, [1] * 4], "any_name": [[2, 3], [4]], "other": ["a", "b"]}
    table = pa.table(columns)
    parquet.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    source = datasets.Dataset.from_dict(columns) if kind == "dataset" else str(tmp_path / f"a.{kind}")
    with pytest.raises(ValueError, match="The column 'any_name' holds lists of integers and is not read"):
        read(source, tmp_path)


def test_a_mask_beside_labels_says_that_labels_count(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2, 3], "labels": [1, -100, 3], "assistant_masks": [1, 1, 1]}]
    with pytest.raises(ValueError, match="beside labels, and only labels say what is learned. Put -100 into"):
        read(rows, tmp_path)


def test_files_of_a_folder_that_only_begin_as_those_about_data_are_data(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    (folder / ".hidden").mkdir(parents=True)
    names = ["state-of-things.txt", "license-1.txt", "README.md", "_x.txt", ".hidden/y.txt", "z.bak"]
    for name in names:
        (folder / name).write_text(name)
    assert texts(str(folder), tmp_path) == ["license-1.txt", "state-of-things.txt"]
