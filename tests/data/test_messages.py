"""Messages about records and files that no other test of the room meets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_thd import THDDataModule
from lightning_thd.data import ByteTokenizer
from lightning_thd.data.read.columns import as_rows
from tests.data.chats import PLAIN, make_tokenizer
from tests.data.support import open_source

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
ALPACA = {"instruction": "a", "output": "b"}
CALL = {"name": "f", "arguments": {}}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({**ALPACA, "input": 3}, "line 1: instruction, input and output must be strings. Mend or remove"),
        ({**ALPACA, "output": None}, "instruction, input and output must be strings"),
        ({**ALPACA, "history": [["q", "a"]]}, "'history' is not read. Give the whole conversation"),
        ({**ALPACA, "system": ["x"]}, "system is a list; wanted a string. Mend or remove the record"),
        ({"conversations": [{"from": "alien", "value": "a"}]}, "a turn is from 'alien' with a value of"),
        ({"conversations": [{"from": "gpt", "value": None}]}, "a turn is from 'gpt' with a value of type"),
        ({"conversations": [{"from": ["gpt"], "value": "a"}]}, r"a turn is from \['gpt'\] with a value of"),
        ({"conversations": [{"from": "tool_call", "value": "no"}]}, "a turn is from 'tool_call' with"),
        ({"messages": [USER, {**ANSWER, "function_call": CALL}]}, "function_call, which is not read"),
        ({"messages": [USER, ANSWER], "tools": {"a": 1}}, "tools are no list, nor JSON of one. Mend or"),
        ({"messages": [USER, ANSWER], "tools": "no"}, "tools are no list, nor JSON of one. Mend or remove"),
        ({"messages": [USER, {**ANSWER, "content": None}]}, "the role 'assistant' has the content None;"),
        ({"messages": [{"role": "user"}, ANSWER]}, "message of the role 'user' has the content None;"),
        ({"messages": [{**USER, "content": 5}, ANSWER]}, "message of the role 'user' has the content 5;"),
        (
            {"messages": [{**USER, "role": ["user"]}, ANSWER]},
            "messages must be a list of .* each role a string",
        ),
        ({"prompt": [USER], "completion": [{**ANSWER, "content": None}]}, "'assistant' has the content None"),
        ({"input_ids": [[1], [2, 3]]}, r"input_ids is no array of integers \(.*\). Give one row"),
    ],
)
def test_a_record_that_would_train_on_something_else(tmp_path: Path, record: Any, message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=message):
        open_source(file, tokenizer=make_tokenizer(PLAIN))


def test_bytes_of_something_else() -> None:
    with pytest.raises(TypeError, match="tokenizer is a int. Pass a function from a string to ids"):
        THDDataModule(["a text"], capacity=8, tokenizer=5).setup("fit")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"ids\[1\] is -1; wanted 0 or more"):
        ByteTokenizer().decode(np.array([97, -1]))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", "no such file", r"a.parquet is no Parquet file \(.*\). Write it again"),
        ("a.arrow", "no such file", r"a.arrow is no Arrow file \(.*\). Write it again"),
    ],
)
def test_a_damaged_file(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        open_source(tmp_path / name)


def test_documents_beside_records(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a document")
    (tmp_path / "b.jsonl").write_text('{"text": "a record"}')
    with pytest.raises(ValueError, match=r"a.txt is one document of text, and the other files hold records"):
        open_source([tmp_path / "a.txt", tmp_path / "b.jsonl"])


def test_columns_of_other_types(tmp_path: Path) -> None:
    for name, column in (("a", [[1, 2]]), ("b", ["no ids"])):
        pq.write_table(pa.table({"input_ids": column}), tmp_path / f"{name}.parquet")
    with pytest.raises(
        ValueError, match=r"(?s)a.parquet and others have different columns: .*string.* Write"
    ):
        open_source([tmp_path / "a.parquet", tmp_path / "b.parquet"])
    with pytest.raises(ValueError, match="Sequence 0: input_ids is a str"):
        THDDataModule(tmp_path / "b.parquet", capacity=8).setup("fit")


def test_a_folder_of_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]]})
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"saved was saved by datasets. Pass datasets.load_from_disk"):
        open_source(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"test was saved by datasets. Pass datasets.load_from_disk"):
        open_source(tmp_path / "saved" / "test")
    with pytest.raises(IndexError):
        as_rows(rows)[2]


def test_an_address_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")
    with pytest.raises(ValueError, match=r"nowhere://a.jsonl cannot be listed \(.*\). Check the address"):
        open_source("nowhere://a.jsonl", cache_dir=tmp_path)
    memory = fsspec.filesystem("memory")
    memory.pipe("/messages/a.jsonl", b'{"text": "a"}\n')

    def torn(*args: Any, **kwargs: Any) -> Any:
        raise OSError("the connection was closed")

    monkeypatch.setattr(fsspec, "open", torn)
    with pytest.raises(ValueError, match=r"a.jsonl cannot be read \(the connection was closed\). Check the"):
        open_source("memory://messages/a.jsonl", cache_dir=tmp_path)
    memory.rm("/messages", recursive=True)


def test_ready_packs_in_a_mixture(tmp_path: Path) -> None:
    packs = [{"input_ids": [1, 2, 3], "lengths": [1, 2]}]
    data = THDDataModule({"a": (packs, 1.0), "b": ([{"input_ids": [4]}], 1.0)}, capacity=8, packed="packs")
    with pytest.raises(ValueError, match="'a' holds ready packs, which a mixture takes apart. Set"):
        data.setup("fit")
