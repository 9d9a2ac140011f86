"""Files of every kind become the ids that they hold, in their order, or are refused by name."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path
from typing import Any

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_thd import THDDataModule
from lightning_thd.data import ByteTokenizer, StdlibText, read_documents, stdlib_documents
from lightning_thd.data.read.encode import Encoder, tokenize
from lightning_thd.data.read.files import find_files, suffix_of
from lightning_thd.data.read.records import file_chunks
from lightning_thd.data.read.sources import Opener
from lightning_thd.data.store.tokens import cached_store
from lightning_thd.data.streams import Stream
from tests.data.support import batches_of, open_source, read

zstandard = pytest.importorskip("zstandard")


def texts(source: Any, **how: Any) -> list[str]:
    dataset = open_source(source, **how)
    return [ByteTokenizer().decode(dataset[i]["input_ids"]) for i in range(len(dataset))]


def lines(*records: Any) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def write(folder: Path, name: str, content: str | bytes) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


A = lines({"text": "a"})
B = lines({"text": "b"})
PACKED = {
    "gz": gzip.compress(A * 99),
    "bz2": bz2.compress(A * 99),
    "xz": lzma.compress(A * 99),
    "zst": zstandard.compress(A * 99),
}
TEXTS: dict[str, tuple[str, str | bytes, list[str]]] = {
    **{suffix: (f"a.jsonl.{suffix}", packed, ["a"] * 99) for suffix, packed in PACKED.items()},
    "array": ("a.json", '[{"text": "a"},\n {"text": "b"}]', ["a", "b"]),
    "strings": ("a.json", '["a", "b"]', ["a", "b"]),
    "lines in .json": ("a.json", b"\n \n" + A + B, ["a", "b"]),
    "byte-order mark of text": ("a.txt", b"\xef\xbb\xbfhello", ["hello"]),
    "byte-order mark of lines": ("a.jsonl", b"\xef\xbb\xbf" + A, ["a"]),
    "capital suffix": ("A.JSONL", A, ["a"]),
    "brackets in the name": ("a[1].jsonl", A, ["a"]),
    "blank lines": ("a.jsonl", b"\n\n" + A + b"\n", ["a"]),
    "several members": ("a.jsonl.gz", gzip.compress(A) * 2, ["a", "a"]),
    "members of zstandard": ("a.jsonl.zst", zstandard.compress(A) + zstandard.compress(B), ["a", "b"]),
    "zeros behind a member": ("a.jsonl.gz", gzip.compress(A) + b"\0" * 9, ["a"]),
    "padded xz": ("a.jsonl.xz", lzma.compress(A) + b"\0" * 8, ["a"]),
    "accents": ("a.jsonl", lines({"text": "d\u00e9j\u00e0"}), ["d\u00e9j\u00e0"]),
    # cells of tables are text, whatever they look like
    "numbers and nothing": ("a.csv", b"text,x\n12,1\nNA,2\n,3\nnull,4\n", ["12", "NA", "", "null"]),
    "byte-order mark of a table": ("a.csv", b"\xef\xbb\xbftext,x\nhello,1\n", ["hello"]),
    "quoted line ends": ("a.csv", b'text,x\r\n"a\nb",1\r\nc,2\r\n', ["a\nb", "c"]),
    "quotes in quotes": ("a.csv", b'text,x\n"say ""no"", or yes",1\n', ['say "no", or yes']),
    "inch marks": ("a.csv", b'text,x\n5" pipe,1\n6" pipe,2\n', ['5" pipe', '6" pipe']),
    "tabs": ("a.tsv", b"x\ttext\n1\ta, b\n", ["a, b"]),
    "a column without a name": ("a.csv", b",text\n0,hi\n1,ho\n", ["hi", "ho"]),
    "a long cell": ("a.csv", b"text\n" + b"x" * 200_000 + b"\n", ["x" * 200_000]),
}
IDS = {"input_ids": [1, 2, 3]}
REFUSED: dict[str, tuple[str, str | bytes, str]] = {
    **{
        f"{suffix} cut": (f"a.jsonl.{suffix}", x[:-9], "is damaged and cannot be unpacked")
        for suffix, x in PACKED.items()
    },
    **{
        f"{suffix} and more": (f"a.jsonl.{suffix}", x + b"junk", "is damaged and cannot be unpacked")
        for suffix, x in PACKED.items()
    },
    "a mask of the loss": ("a.jsonl", lines({**IDS, "loss_mask": [0, 0, 1]}), "carry 'loss_mask', which is"),
    "segments": ("a.jsonl", lines({**IDS, "segment_ids": [0, 0, 1]}), "sequences of one row would see each"),
    "an id of -1": ("a.jsonl", lines({"input_ids": [5, -1]}), "line 1: the record has the token id -1"),
    "a label of -1": ("a.jsonl", lines({**IDS, "labels": [-1, 2, 3]}), "line 1: the record has the label"),
    "nested ids": ("a.jsonl", lines({"input_ids": [[1], [2, 3]]}), "input_ids is not an array of integers"),
    "bools": ("a.jsonl", '{"input_ids": [true, 7]}\n', "input_ids holds True or False among its numbers"),
    "padding": ("a.jsonl", lines({**IDS, "attention_mask": [1, 1, 0]}), "an attention_mask of shape .* that"),
    "weights": ("a.jsonl", lines({**IDS, "weights": [1, 1, 0]}), "weights beside input_ids would be lost"),
    "packs": ("a.jsonl", lines({**IDS, "position_ids": [0, 1, 0]}), "position_ids beside input_ids"),
    "lengths": ("a.jsonl", lines({**IDS, "lengths": [1, 2]}), "lengths beside input_ids"),
    "labels later": ("a.jsonl", lines(IDS, {**IDS, "labels": [1, 2, 3]}), "line 2: it has labels, .* Give"),
    "labels first": (
        "a.jsonl",
        lines({**IDS, "labels": [1, 2, 3]}, IDS),
        "line 2: it has no labels, .* Give",
    ),
    "Latin-1 text": ("a.txt", b"caf\xe9", r"a.txt: not UTF-8 \(byte 0xe9 at 3\)"),
    "Latin-1 lines": ("a.jsonl", A + b'{"text": "caf\xe9"}\n', "line 2: not UTF-8"),
    "UTF-16 without a mark": ("a.txt", "hello".encode("utf-16")[2:], "a null byte at 1, so it is not text"),
    "half a pair": ("a.jsonl", '{"text": "a\\ud800"}\n', "line 1: .*surrogates not allowed"),
    "depth": ("a.jsonl", A + b'{"text": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "line 2: JSON that"),
    "digits": ("a.jsonl", A + b'{"text": ' + b"7" * 5_000 + b"}", "line 2: JSON that cannot be read"),
    "trailing comma": ("a.jsonl", '{"text": "a"},\n', "line 1: not JSON"),
    "lines without a suffix": ("lines", A, "holds a JSON object per line. Name it"),
    "lines under another suffix": ("a.part", A, "holds a JSON object per line. Name it"),
    "text that is null": (
        "a.jsonl",
        lines({"text": None}),
        "value of the key 'text' is a NoneType, not a string",
    ),
    "another key": (
        "a.json",
        '{"body": "a", "authors": [{"text": "x"}]}',
        "no string under the key 'text', f",
    ),
    "arrays of numpy": ("a.npy", b"", r"\.npy files are not read"),
    "no Parquet": ("a.parquet", b"no such file", "a.parquet is not a Parquet file"),
    "no Arrow": ("a.arrow", b"no such file", "a.arrow is not an Arrow file"),
    "more cells than columns": ("a.csv", b"text,x\na,1\nb,2,3\n", r"a\.csv"),
    "more cells in every row": ("a.csv", b"text\nhi, ho\n", r"a\.csv"),
    "fewer cells than columns": ("a.csv", b"text,x\na\nb,2\n", r"a\.csv"),
    "Latin-1 cells": ("a.csv", b"text,x\ncaf\xe9,2\n", r"a\.csv"),
    "one name twice": ("a.csv", b"text,text\na,b\n", r"a\.csv"),
    "an open quote": ("a.csv", b'text,x\na,1\n"b,1\n', r"a\.csv"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_text_is_read_as_it_is_meant(case: str, tmp_path: Path) -> None:
    name, content, expected = TEXTS[case]
    assert texts(write(tmp_path, name, content)) == expected


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_train_on_something_else_is_refused(case: str, tmp_path: Path) -> None:
    name, content, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        open_source(write(tmp_path, name, content))


def test_a_bad_line_is_skipped_and_listed(tmp_path: Path) -> None:
    file = write(tmp_path, "d.jsonl", A + b'{"text": "a\n' + B)
    data = THDDataModule(file, capacity=32, on_error="skip", cache_dir=tmp_path / "c")
    [batch] = batches_of(data)
    assert batch.stats.real_tokens == 4
    assert data.counts["train"]["skipped"] == 1
    [listed] = (tmp_path / "c").glob("tokens-*/skipped.jsonl")
    assert json.loads(listed.read_text())["place"] == f"{file}, line 2"
    for cache in ("c", "d"):  # one that was built with another bound, and none
        with pytest.raises(ValueError, match=r"1 records are bad, more than max_errors=0; .*line 2"):
            open_source(file, on_error="skip", max_errors=0, cache_dir=tmp_path / cache)


def columns(folder: Path, name: str, **given: Any) -> Path:
    table = pa.table(given)
    file = folder / name
    if file.suffix == ".parquet":
        pa.parquet.write_table(table, file, row_group_size=1)
    elif file.suffix == ".feather":
        pa.feather.write_feather(table, str(file))
    else:
        with pa.ipc.new_file(str(file), table.schema) as writer:
            writer.write_table(table)
    return file


@pytest.mark.parametrize("column", ["text", "input_ids"])
def test_a_file_with_a_damaged_page_is_named(column: str, tmp_path: Path) -> None:
    values = ["some text"] * 50 if column == "text" else [[1, 2, 3]] * 50
    for name in "ab":
        columns(tmp_path, f"{name}.parquet", **{column: pa.array(values)})
    file = tmp_path / "b.parquet"
    file.write_bytes(b"PAR1" + bytes(40) + file.read_bytes()[44:])
    with pytest.raises(ValueError, match=r"(?s)b.parquet is damaged from row 0 on \(.*\). Write it again."):
        THDDataModule(str(tmp_path), capacity=64, cache_dir=tmp_path / "cache").setup("fit")


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather"])
def test_columns_of_ids_and_of_text(suffix: str, tmp_path: Path) -> None:
    other_writers = pa.array([[4]], pa.list_(pa.field("element", pa.int64())))  # pyarrow writes "item"
    for number, rows in enumerate(([[1, 2], [3]], pa.array([], pa.list_(pa.int64())), other_writers)):
        columns(tmp_path, f"{number}.{suffix}", input_ids=rows)
    assert read(tmp_path) == [[1, 2], [3], [4]]
    with pytest.raises(ValueError, match=r"1\.\w+ has no rows"):
        open_source(tmp_path / f"1.{suffix}")
    assert read(Stream(str(tmp_path / f"0.{suffix}"))) == [[1, 2], [3]]
    assert texts(columns(tmp_path, f"t.{suffix}", text=["one", "two"], other=[1, 2])) == ["one", "two"]
    with pytest.raises(ValueError, match="but neither 'input_ids'"):
        open_source(columns(tmp_path, f"n.{suffix}", other=[1, 2]))


@pytest.mark.parametrize("order", [1, -1])
def test_files_of_which_some_have_labels_are_refused(tmp_path: Path, order: int) -> None:
    tables: list[dict[str, Any]] = [{"input_ids": [[1, 2]], "labels": [[-100, 2]]}, {"input_ids": [[3, 4]]}]
    for number, table in enumerate(tables[::order]):
        columns(tmp_path, f"{number}.parquet", **table)
    with pytest.raises(ValueError, match=r"different columns: .*'labels'"):
        open_source(tmp_path)


def test_lists_of_every_kind_of_arrow(tmp_path: Path) -> None:
    kinds = [pa.large_list(pa.int64()), pa.list_(pa.int32(), 2), pa.list_(pa.int8()), pa.list_(pa.uint64())]
    for k, kind in enumerate(kinds):
        file = columns(tmp_path, f"{k}.parquet", input_ids=pa.array([[1, 2], [3, 4]], kind))
        assert read(file) == [[1, 2], [3, 4]]


def test_lists_globs_and_folders_are_files_and_not_documents(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    b = write(folder, "b.jsonl", lines({"text": "three"}))
    a = write(folder, "a.jsonl", lines({"text": "one"}, {"text": "two"}))

    for source in ([str(b), str(a)], [b, a]):
        assert texts(source) == ["three", "one", "two"]
    for source in (str(folder / "*.jsonl"), folder, [str(folder / "a*"), str(folder / "b*")]):
        assert texts(source) == ["one", "two", "three"]
    assert texts([str(a), str(b)]) == ["one", "two", "three"]
    with pytest.raises(ValueError, match=r"The list has 2 strings, of which 1 name files, but "):
        open_source([str(a), "a document"])
    for nothing in (["/nowhere/at-all"], [str(a), str(folder / "nothing.jsonl")]):
        with pytest.raises(ValueError, match="no file matches it"):
            open_source(nothing)

    table = write(folder, "a.csv", "text\nhi\n")
    with pytest.raises(ValueError, match="a.csv is a table. Tables are not read beside other files"):
        open_source([table, a])
    with pytest.raises(ValueError, match=r"a.csv is a table. Tables are not read .* by read_documents"):
        next(read_documents(table))
    with pytest.raises(ValueError, match="a.csv is a table. Tables are not read .* with processor="):
        Opener(processor=object()).open(table)

    note = write(folder, "notes.txt", "x")
    with pytest.raises(ValueError, match="is one document of text, but other files hold records"):
        open_source([note, a])
    with pytest.raises(ValueError, match=r"holds 1 table and 2 JSONL files"):
        open_source(folder)

    write(folder / "splits", "test.jsonl", A)
    write(folder / "splits", "train-00000-of-00001.jsonl", B)
    with pytest.raises(ValueError, match=r"holds several splits: test, train"):
        open_source(folder / "splits")

    datasets.Dataset.from_dict({"input_ids": [[1]]}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"saved was saved by datasets"):
        open_source(tmp_path / "saved")


def test_strings_that_are_no_paths_are_documents() -> None:
    documents = ["first", "second\nline", "/ is no file"]
    assert [bytes(row[:-1]).decode() for row in read(documents)] == sorted(documents)


@pytest.mark.parametrize("wrap", [str, lambda path: Stream(str(path))], ids=["files", "stream"])
def test_a_folder_with_brackets_in_its_name_is_read_as_it_is_written(wrap: Any, tmp_path: Path) -> None:
    one = [[*b"one", 257]]
    two = [[*b"two", 257]]
    write(tmp_path / "d[x]", "a.jsonl", lines({"text": "one"}))
    write(tmp_path / "dx", "a.jsonl", lines({"text": "two"}))
    for pattern in ("d[x]/a.jsonl", "d[x]/*.jsonl", "d[x]", "d[x]/**/*.jsonl"):
        assert read(wrap(tmp_path / pattern)) == one, pattern
    assert read(wrap(tmp_path / "d[xy]" / "a.jsonl")) == two


def test_what_of_a_folder_is_data(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    for name in ("state-of-things.txt", "license-1.txt", "README.md", "_x.txt", ".hidden/y.txt", "z.bak"):
        write(folder, name, name)
    assert texts(folder) == ["license-1.txt", "state-of-things.txt"]
    (folder / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="link is a link to a folder. Links are not followed"):
        open_source(folder)


def test_addresses_are_fetched_once_into_the_cache(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/corpus/b.jsonl", lines({"text": "far"}))
    memory.pipe("/corpus/c.jsonl.gz", gzip.compress(lines({"text": "away"})))

    assert texts("memory://corpus/*.jsonl*", cache_dir=tmp_path) == ["far", "away"]
    assert all(path.resolve().is_relative_to(tmp_path) for path in tmp_path.rglob("*"))

    memory.pipe("/corpus/b.jsonl", lines({"text": "new"}))
    assert texts("memory://corpus/b.jsonl", cache_dir=tmp_path) == ["new"]
    with pytest.raises(ValueError, match="does not exist, or holds no data"):
        open_source("memory://corpus/none.jsonl")

    memory.pipe({"/corpus/README.md": b"x", "/corpus/sub/test.jsonl": A})
    assert texts("memory://corpus", cache_dir=tmp_path) == ["new", "away", "a"]
    assert texts("memory://corpus/[!R]*", cache_dir=tmp_path) == ["new", "away"]

    memory.pipe("/corpus/sub/train.jsonl", A)
    with pytest.raises(ValueError, match=r"/corpus holds several splits: test, train"):
        open_source("memory://corpus")
    assert suffix_of("https://x.org/a.jsonl.gz?download=true") == ".jsonl"

    memory.rm("/corpus", recursive=True)


def test_ids_in_lines_are_ids(tmp_path: Path) -> None:
    given = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [8]}]
    store = open_source(write(tmp_path, "d.jsonl", lines(*given)))
    found = [{name: row[name].tolist() for name in row} for row in (store[0], store[1])]
    assert found == given


def test_labels_of_a_table_are_numbers(tmp_path: Path) -> None:
    dataset = open_source(write(tmp_path, "a.csv", "text,label\nhi,1\nho,0\n"))
    assert [int(dataset[i]["label"]) for i in range(2)] == [1, 0]
    assert texts(write(tmp_path, "b.csv", "label\n12\n"), text_key="label") == ["12"]


@pytest.mark.parametrize("name", ["d.jsonl", "d.csv"])
def test_a_file_is_tokenised_once_and_again_when_its_content_changes(tmp_path: Path, name: str) -> None:
    def put(text: str) -> Path:
        return write(tmp_path, name, f"text\n{text}\n" if name.endswith("csv") else lines({"text": text}))

    file = put("old")
    cache = tmp_path / "cache"
    calls = []

    class Tokenizer(ByteTokenizer):
        def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
            calls.append(text)
            return super().__call__(text, add_special_tokens)

    before = file.stat()
    for _ in range(2):
        assert texts(file, cache_dir=cache, tokenizer=Tokenizer()) == ["old"]
    put("new")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    assert texts(file, cache_dir=cache, tokenizer=Tokenizer()) == ["new"]
    assert calls == ["old", "new"]
    assert open_source(file, tokenizer=lambda text: [len(text)])[0]["input_ids"].tolist() == [3]


@given(
    texts=st.lists(st.text(max_size=20), min_size=1, max_size=20),
    chunk_bytes=st.integers(1, 60),
    blank=st.booleans(),
)
def test_chunks_of_any_size_give_every_line_once(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], chunk_bytes: int, blank: bool
) -> None:
    file = tmp_path_factory.getbasetemp() / "chunks.jsonl"
    written = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    file.write_text(("\n\n" if blank else "\n").join(written), encoding="utf-8", errors="replace")
    chunks = file_chunks(find_files(file), chunk_bytes=chunk_bytes)
    read = [record for chunk in chunks for _, record in chunk()]
    assert read == [json.loads(line.encode(errors="replace")) for line in written]
    places = [str(place) for chunk in chunks for place, _ in chunk()]
    assert places == [f"{file}, line {1 + i * (2 if blank else 1)}" for i in range(len(texts))]


def test_any_number_of_processes_gives_the_same_store(tmp_path: Path) -> None:
    texts = [f"document {i} " * (i % 7) for i in range(500)]
    file = write(tmp_path, "d.jsonl", lines(*({"text": text} for text in texts)))
    tokenizer = ByteTokenizer()
    for num_workers in (0, 2):
        chunks = file_chunks(find_files(file), chunk_bytes=1000)
        parts = tokenize(chunks, Encoder(tokenizer=tokenizer, kind="text"), num_workers=num_workers)
        store = cached_store(None, lambda first, parts=parts: parts, cache_dir=tmp_path)
        assert store.tokens.dtype == np.uint16
        assert [row["input_ids"].tolist() for row in store] == [tokenizer(text).tolist() for text in texts]
    write(tmp_path, "d.jsonl", A * 300 + b'{"text": 1}\n')
    with pytest.raises(ValueError, match=r"d\.jsonl, line 301: the value of the key 'text'"):
        open_source(file, num_workers=2)


def test_documents_and_the_standard_library(tmp_path: Path) -> None:
    file = write(tmp_path, "d.jsonl", lines({"body": "one"}, {"body": "two"}) + b"\n")
    assert list(read_documents(file, text_key="body")) == ["one", "two"]
    for name in ("b.txt", "a.md", "x.bin"):
        write(tmp_path / "sub", name, name)
    assert list(read_documents(tmp_path / "sub")) == ["a.md", "b.txt"]
    documents = stdlib_documents(max_bytes=2048)
    assert len(documents) > 5000
    assert max(len(text.encode()) for text in documents) <= 2048
    store = StdlibText(max_bytes=2048)
    assert len(store) == len(documents)
    assert ByteTokenizer().decode(store[7]["input_ids"]) == documents[7]


@given(text=st.text())
def test_byte_tokenizer_round_trips(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer(text)
    assert ids[-1] == tokenizer.eos_token_id
    assert ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(ids) == text.encode("utf-8", errors="replace").decode()
