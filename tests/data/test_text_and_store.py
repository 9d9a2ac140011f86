"""Documents and token stores against what was written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_thd.data import ByteTokenizer, StdlibText, TokenStore, read_documents, stdlib_documents
from lightning_thd.data.store.tokens import Rows, cached_store
from tests.data.support import open_source

ROWS = st.lists(st.lists(st.integers(0, 70_000), max_size=9), max_size=12)


@given(rows=ROWS)
def test_store_gives_every_row_back(rows: list[list[int]]) -> None:
    store = TokenStore.from_rows(rows)
    assert [store[i]["input_ids"].tolist() for i in range(len(store))] == rows
    assert store.lengths.tolist() == [len(row) for row in rows]
    assert store.loss_tokens.tolist() == [max(0, len(row) - 1) for row in rows]
    assert store.tokens.dtype in (np.uint16, np.uint32)


@given(rows=st.lists(st.lists(st.sampled_from([-100, 5]), min_size=1, max_size=9), min_size=1, max_size=9))
def test_store_counts_labels_from_the_second_token_on(rows: list[list[int]]) -> None:
    flat = np.array([label for row in rows for label in row])
    offsets = np.array([0, *np.cumsum([len(row) for row in rows])])
    store = TokenStore(np.zeros(len(flat), np.uint16), offsets, flat)
    assert store.loss_tokens.tolist() == [sum(label != -100 for label in row[1:]) for row in rows]
    assert store[0]["labels"].tolist() == rows[0]


def test_corrupt_store_names_the_folder_and_a_cache_is_built_anew(tmp_path: Path) -> None:
    built = []

    def build(first: int) -> list[Rows]:
        built.append(1)
        return [Rows(np.array([1, 2, 3]), np.array([2, 1]))]

    for _ in range(2):
        cached_store({"a": 1}, build, cache_dir=tmp_path)
    assert len(built) == 1
    [folder] = tmp_path.glob("tokens-*")
    (folder / "tokens.npy").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"folder .* cannot be read .*Delete it"):
        TokenStore.open(folder)
    with pytest.warns(UserWarning, match="built again"):
        assert cached_store({"a": 1}, build, cache_dir=tmp_path)[0]["input_ids"].tolist() == [1, 2]
    assert len(built) == 2


@given(text=st.text())
def test_byte_tokenizer_round_trips(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer(text)
    assert ids[-1] == tokenizer.eos_token_id
    assert ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(ids) == text.encode("utf-8", errors="replace").decode()


def test_documents_come_from_jsonl_files_and_folders(tmp_path: Path) -> None:
    jsonl = tmp_path / "d.jsonl"
    jsonl.write_text("\n".join(json.dumps({"body": text}) for text in ("one", "two")) + "\n\n")
    assert list(read_documents(jsonl, text_key="body")) == ["one", "two"]
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_text("B")
    (tmp_path / "sub" / "a.md").write_text("A")
    (tmp_path / "sub" / "x.bin").write_bytes(b"\0")
    assert list(read_documents(tmp_path / "sub")) == ["A", "B"]
    assert list(read_documents(tmp_path / "sub" / "b.txt")) == ["B"]


def test_source_is_tokenised_once_and_again_when_the_file_changes(tmp_path: Path) -> None:
    file, cache = tmp_path / "d.jsonl", tmp_path / "cache"
    file.write_text('{"text": "ab"}\n')
    assert open_source(file, cache_dir=cache)[0]["input_ids"].tolist() == [97, 98, 257]
    assert len(list(cache.iterdir())) == 1
    open_source(file, cache_dir=cache)
    assert len(list(cache.iterdir())) == 1
    file.write_text('{"text": "abc"}\n')
    assert open_source(file, cache_dir=cache)[0]["input_ids"].tolist() == [97, 98, 99, 257]
    assert open_source(file, tokenizer=lambda text: [len(text)])[0]["input_ids"].tolist() == [3]


def test_parquet_columns_are_a_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict(
        {"input_ids": [[1, 2], [3]], "labels": [[-100, 2], [3]], "other": [0, 1]}
    )
    table.to_parquet(str(tmp_path / "t.parquet"))
    found = open_source(tmp_path / "t.parquet")
    assert found[0]["input_ids"].tolist() == [1, 2]
    assert set(found[1]) == {"input_ids", "labels"}
    table.remove_columns("input_ids").to_parquet(str(tmp_path / "bad.parquet"))
    with pytest.raises(ValueError, match="but no 'input_ids'"):
        open_source(tmp_path / "bad.parquet")


def test_the_standard_library_is_a_data_set() -> None:
    documents = stdlib_documents(max_bytes=2048)
    assert len(documents) > 5000
    assert max(len(text.encode()) for text in documents) <= 2048
    assert any(text.lstrip().startswith("class ") for text in documents)
    store = StdlibText(max_bytes=2048)
    assert len(store) == len(documents)
    assert ByteTokenizer().decode(store[7]["input_ids"]) == documents[7]
