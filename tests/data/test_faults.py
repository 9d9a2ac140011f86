"""What used to train on the wrong tokens, or to end in an error that named nothing."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from lightning_thd import THDDataModule
from lightning_thd.data import TokenStore
from lightning_thd.data.read.columns import as_rows
from tests.data.chats import make_tokenizer
from tests.data.support import batches_of, open_source


def texts(dataset: Any) -> list[str]:
    return [
        bytes(np.asarray(dataset[i]["input_ids"])[:-1].astype(np.uint8)).decode() for i in range(len(dataset))
    ]


def lines(path: Path, *documents: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def test_lists_globs_and_folders_are_files_and_not_documents(tmp_path: Path) -> None:
    tmp_path = tmp_path / "data"
    tmp_path.mkdir()
    a, b = lines(tmp_path / "a.jsonl", "one", "two"), lines(tmp_path / "b.jsonl", "three")
    for source in ([str(b), str(a)], [b, a]):
        assert texts(open_source(source)) == ["three", "one", "two"]
    for source in (str(tmp_path / "*.jsonl"), tmp_path, [str(tmp_path / "a*"), str(tmp_path / "b*")]):
        assert texts(open_source(source)) == ["one", "two", "three"]
    data = THDDataModule([str(a), str(b)], capacity=32)
    assert sum(batch.stats.real_tokens for batch in batches_of(data)) == len("onetwothree") + 3
    with pytest.raises(ValueError, match=r"The list has 2 strings, of which 1 name files, and "):
        open_source([str(a), "a document"])
    with pytest.raises(ValueError, match="does not exist, and no file matches it"):
        open_source(["/nowhere/at-all"])
    with pytest.raises(ValueError, match="no file matches it"):
        open_source([str(a), str(tmp_path / "nothing.jsonl")])
    lines(tmp_path / "test.jsonl", "x")
    lines(tmp_path / "train-00000-of-00001.jsonl", "y")
    with pytest.raises(ValueError, match=r"holds several splits: test, train. Give a glob"):
        open_source(tmp_path)


def test_strings_that_are_no_paths_are_documents() -> None:
    data = THDDataModule(["first", "second\nline", "/ is no file"], capacity=64)
    data.setup("fit")
    assert texts(data._sets["train"].dataset) == ["first", "second\nline", "/ is no file"]


def test_compressed_files_json_and_columns_of_text(tmp_path: Path) -> None:
    content = b'{"text": "one"}\n{"text": "two"}\n'
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(content))
    (tmp_path / "d.jsonl.zst").write_bytes(zstandard.compress(content))
    (tmp_path / "d.jsonl.bz2").write_bytes(bz2.compress(content))
    (tmp_path / "d.jsonl.xz").write_bytes(lzma.compress(content))
    (tmp_path / "array.json").write_text('[{"text": "one"},\n {"text": "two"}]')
    (tmp_path / "lines.json").write_bytes(content)
    table = pa.table({"text": ["one", "two"], "other": [1, 2]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=1)
    with pa.ipc.new_file(str(tmp_path / "t.arrow"), table.schema) as writer:
        writer.write_table(table)
    for file in sorted(tmp_path.iterdir()):
        if file.is_file():
            assert texts(open_source(file, cache_dir=tmp_path / "c")) == ["one", "two"], file
    (tmp_path / "x.npy").write_bytes(b"")
    with pytest.raises(ValueError, match=r"a \.npy file is not read"):
        open_source(tmp_path / "x.npy")


def test_addresses_are_fetched_once_into_the_cache(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/corpus/b.jsonl", b'{"text": "far"}\n')
    memory.pipe("/corpus/c.jsonl.gz", gzip.compress(b'{"text": "away"}\n'))
    found = open_source("memory://corpus/*.jsonl*", cache_dir=tmp_path)
    assert texts(found) == ["far", "away"]
    assert all(path.resolve().is_relative_to(tmp_path) for path in tmp_path.rglob("*"))
    memory.pipe("/corpus/b.jsonl", b'{"text": "new"}\n')
    assert texts(open_source("memory://corpus/b.jsonl", cache_dir=tmp_path)) == ["new"]
    with pytest.raises(ValueError, match="does not exist, or holds no data"):
        open_source("memory://corpus/none.jsonl")


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"instruction": "Hi", "input": "", "output": "Hello"},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
        {
            "prompt": [{"role": "user", "content": "Hi"}],
            "completion": [{"role": "assistant", "content": "Hello"}],
        },
    ],
)
def test_conversations_of_every_kind_become_the_same_ids(tmp_path: Path, record: dict[str, Any]) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps(record))
    tokenizer = make_tokenizer()
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    wanted = tokenizer.apply_chat_template(messages, tokenize=True)["input_ids"]
    store: Any = open_source(file, tokenizer=tokenizer)
    assert store[0]["input_ids"].tolist() == wanted
    answer = tokenizer("Hello<|end|>", add_special_tokens=False)["input_ids"]
    assert [label for label in store[0]["labels"].tolist() if label != -100] == answer


def test_ids_in_lines_are_ids(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text('{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}\n{"input_ids": [8], "labels": [8]}\n')
    store: Any = open_source(file)
    assert [store[i]["input_ids"].tolist() for i in range(2)] == [[5, 6, 7], [8]]
    assert store[0]["labels"].tolist() == [-100, 6, 7]
    file.write_text('{"input_ids": [5, -6]}\n')
    with pytest.raises(ValueError, match="line 1: the record has the token id -6"):
        open_source(file)


BAD_LINES = {
    "a surrogate": (b'{"text": "\\ud800"}', "line 2: .*surrogates not allowed"),
    "depth": (b'{"text": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "line 2: JSON that cannot be read"),
    "digits": (b'{"text": ' + b"7" * 5_000 + b"}", "line 2: JSON that cannot be read"),
    "torn": (b'{"text": "a', "line 2: not JSON"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_lines_are_named_or_skipped_and_listed(tmp_path: Path, name: str) -> None:
    line, message = BAD_LINES[name]
    file = tmp_path / "d.jsonl"
    file.write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "too"}\n')
    with pytest.raises(ValueError, match=message):
        open_source(file)
    data = THDDataModule(file, capacity=32, on_error="skip", cache_dir=tmp_path / "c")
    [batch] = batches_of(data)
    assert batch.stats.real_tokens == len("goodtoo") + 2
    assert data.counts["train"]["skipped"] == 1
    [listed] = (tmp_path / "c").glob("tokens-*/skipped.jsonl")
    assert json.loads(listed.read_text())["place"] == f"{file}, line 2"
    with pytest.raises(ValueError, match=r"1 records are bad, more than max_errors=0; the first: .*line 2"):
        batches_of(THDDataModule(file, capacity=32, on_error="skip", max_errors=0, cache_dir=tmp_path / "d"))
    batches_of(THDDataModule(file, capacity=32, on_error="skip", cache_dir=tmp_path / "d"))
    with pytest.raises(ValueError, match=r"1 records are bad, more than max_errors=0; the first: .*line 2"):
        batches_of(THDDataModule(file, capacity=32, on_error="skip", max_errors=0, cache_dir=tmp_path / "d"))


def test_a_tokenizer_that_raises_names_the_line(tmp_path: Path) -> None:
    def tokenizer(text: str) -> list[int]:
        if text == "b":
            raise KeyError("no such letter")
        return [1]

    with pytest.raises(ValueError, match=r"line 2: the tokenizer raised KeyError \('no such letter'\)"):
        open_source(lines(tmp_path / "d.jsonl", "a", "b"), tokenizer=tokenizer)


ROWS = [
    ({"input_ids": [1, -2]}, "has the token id -2"),
    ({"input_ids": [1, None]}, "input_ids is a list|has the token id|input_ids"),
    ({"input_ids": [1, 2**31]}, "has the token id 2147483648"),
    ({"input_ids": [1, 2], "labels": [1]}, "2 input_ids but 1 labels"),
    ({"input_ids": [1, 2], "labels": [1, -7000]}, "has the label -7000"),
]


@pytest.mark.parametrize("form", ["list", "arrow", "parquet"])
@pytest.mark.parametrize("k", range(len(ROWS)))
def test_bad_rows_are_named_at_preparation_or_skipped(tmp_path: Path, form: str, k: int) -> None:
    import datasets

    row, message = ROWS[k]
    good = {name: [1, 2] for name in row}
    rows = [good, good, row, good]
    source: Any = rows
    if form != "list":
        source = datasets.Dataset.from_list(rows)
    if form == "parquet":
        source.to_parquet(str(tmp_path / "t.parquet"))
        source = tmp_path / "t.parquet"
    with pytest.raises(ValueError, match=rf"(Sequence|Row) 2\b.*({message})"):
        THDDataModule(source, capacity=8).setup("fit")
    data = THDDataModule(source, capacity=8, on_error="skip")
    with pytest.warns(UserWarning, match="1 bad rows are left out; the first: Row 2"):
        [batch] = batches_of(data)
    assert sorted(batch.sequence_ids) == [0, 1, 3]
    assert data.counts["train"]["skipped"] == 1
    assert data.counts["train"]["empty"] == 0


def test_rows_that_are_no_samples_are_named() -> None:
    import datasets

    for rows, kind in (([(1, 2)], "tuple"), ([None], "NoneType"), ([[1]], "list")):
        with pytest.raises(TypeError, match=f"Row 0 of the dataset is a {kind}, wanted a dict"):
            THDDataModule(rows, capacity=8).setup("fit")
    with pytest.raises(TypeError, match="Row 1 of the dataset is a NoneType"):
        THDDataModule([{"input_ids": [1]}, None], capacity=8).setup("fit")
    table = datasets.Dataset.from_dict({"input_ids": [[1]]})
    with pytest.raises(TypeError, match=r"keys \['train', 'test'\] is no dataset. Pass one of"):
        THDDataModule(datasets.DatasetDict(train=table, test=table), capacity=8).setup("fit")
    with pytest.raises(TypeError, match=r"A dict with the keys \['input_ids'\] is no dataset"):
        THDDataModule({"input_ids": [[1]]}, capacity=8).setup("fit")
    with pytest.raises(TypeError, match="int is no dataset"):
        THDDataModule(7, capacity=8).setup("fit")  # type: ignore[arg-type]


def test_ids_outside_the_vocabulary_are_found_before_the_first_batch() -> None:
    rows = [{"input_ids": [1, 2]}, {"input_ids": [1, 64]}]
    for source in (rows, as_rows(_table(rows)), TokenStore.from_rows([[1, 2], [1, 64]])):
        data = THDDataModule(source, capacity=8, vocab_size=64)
        data.setup("fit")
        with pytest.raises(ValueError, match="Sequence 1 of the train data has the token id 64"):
            data.train_dataloader()


def _table(rows: list[dict[str, Any]]) -> Any:
    import datasets

    return datasets.Dataset.from_list(rows)


def test_errors_of_collation_name_the_row_of_the_dataset() -> None:
    class Lies(list[dict[str, Any]]):
        lengths = (2, 2, 2)
        loss_tokens = (1, 1, 1)

    rows = Lies([{"input_ids": [1, 2]}, {"input_ids": [3, 4]}, {"input_ids": [5, -6]}])
    data = THDDataModule(rows, capacity=4)
    with pytest.raises(ValueError, match="Sequence 2 has the token id -6"):
        batches_of(data)


def test_labels_that_changed_under_a_fingerprint_are_found_out(tmp_path: Path) -> None:
    class Known(list[dict[str, Any]]):
        fingerprint = "mine"

    first = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}]
    then = [{"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}]
    batches_of(THDDataModule(Known(first), capacity=4, cache_dir=tmp_path))
    with pytest.raises(ValueError, match="Sequence 0 has 1 loss tokens, but 2 were counted. Correct"):
        batches_of(THDDataModule(Known(then), capacity=4, cache_dir=tmp_path))


def test_a_file_of_the_same_size_and_time_is_read_again(tmp_path: Path) -> None:
    file = lines(tmp_path / "d.jsonl", "old")
    before = file.stat()
    assert texts(open_source(file, cache_dir=tmp_path / "c")) == ["old"]
    lines(file, "new")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    assert texts(open_source(file, cache_dir=tmp_path / "c")) == ["new"]


def test_other_columns_of_a_dataset_are_left_out() -> None:
    rows = _table([{"input_ids": [1, 2], "name": "a", "special_tokens_mask": [0, 0], "length": 2}] * 3)
    [batch] = batches_of(THDDataModule(rows, capacity=8))
    assert batch.extras == {}
    assert batch.stats.real_tokens == 6


def test_rows_of_columns_are_views() -> None:
    table = _table([{"input_ids": list(range(n + 1)), "labels": [-100] * (n + 1)} for n in range(50)])
    rows = as_rows(table.select(range(9, 40)))
    assert rows[0]["labels"].tolist() == [-100] * 10
    assert rows[0]["labels"].base is not None  # no copy
