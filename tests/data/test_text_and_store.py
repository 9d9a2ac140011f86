"""Documents and token stores against what was written."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_thd.data import ByteTokenizer, StdlibText, TokenStore, read_documents, stdlib_documents
from lightning_thd.data.read.sources import open_source
from lightning_thd.data.read.text import definitions
from lightning_thd.data.store import Rows, cached_store

ROWS = st.lists(st.lists(st.integers(0, 70_000), max_size=9), max_size=12)


def test_documents_of_a_list_of_files(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n')
    assert list(read_documents([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])) == ["a", "b"]
    with pytest.raises(TypeError, match="A int names no file. Give a path, a glob, or a list"):
        list(read_documents(3))  # type: ignore[arg-type]


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


def test_store_survives_disk(tmp_path: Path) -> None:
    store = TokenStore(np.arange(5, dtype=np.uint16), np.array([0, 2, 5]), np.array([-100, 1, 2, 3, 4]))
    store.save(tmp_path / "deep" / "s")
    back = TokenStore.open(tmp_path / "deep" / "s")
    assert isinstance(back.tokens, np.memmap)
    assert back[1]["input_ids"].tolist() == [2, 3, 4]
    assert back[-1]["labels"].tolist() == [2, 3, 4]
    assert open_source(tmp_path / "deep" / "s")[0]["input_ids"].tolist() == [0, 1]


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TokenStore(np.zeros(3, int), np.array([0, 2])), "Offsets run from 0 to 3"),
        (lambda: TokenStore(np.zeros(2, int), np.array([0, 2]), np.zeros(3, int)), "2 tokens but 3 labels"),
        (lambda: TokenStore.from_rows([[-1]]), "Token ids start at 0, got -1"),
    ],
)
def test_bad_stores_are_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()
    with pytest.raises(IndexError, match="Sequence 5 of a TokenStore with 1"):
        TokenStore.from_rows([[1]])[5]


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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", r"d\.jsonl, line 2: not JSON"),
        ('{"body": "x"}', r"line 2: no string under the key 'text', found \['body'\].*--text-key"),
        ("[1]", "line 2: a list, wanted one JSON object a line"),
        ('{"text": 3}', "line 2: no string under the key"),
    ],
)
def test_bad_jsonl_lines_name_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        list(read_documents(file))


def test_missing_paths_say_what_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing.jsonl does not exist"):
        list(read_documents(tmp_path / "nothing.jsonl"))
    with pytest.raises(ValueError, match="No text files below"):
        list(read_documents(tmp_path))
    with pytest.raises(ValueError, match="does not exist"):
        open_source(tmp_path / "a.parquet")


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


def test_definitions_come_in_the_order_of_a_walk() -> None:
    source = """
class A:
    def a(self):
        try:
            def b(): pass
        except ValueError:
            class C: pass
        else:
            async def d(): pass
        finally:
            def e(): return [lambda: 0 for _ in ()]
    x = 1 if True else 2
match A:
    case None:
        def f(): pass
for _ in ():
    def g(): pass
else:
    with A() as h:
        def i(): pass
def last(): pass
"""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    for tree in (ast.parse(source), ast.parse(Path(ast.__file__).read_text())):
        walked = [node for node in ast.walk(tree) if isinstance(node, kinds)]
        assert [id(node) for node in definitions(tree)] == [id(node) for node in walked]
        assert len(walked) > 8
