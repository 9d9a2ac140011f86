"""Records that are read in pieces give what they give when they are read whole, or the same refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_thd.data import TokenStore, read_documents
from lightning_thd.data.read import long_text, records
from lightning_thd.data.read.long import json_spans, values
from lightning_thd.data.read.long_text import NoJoint, can_cut, encode_long, encode_pieces
from lightning_thd.data.read.sources import Opener
from lightning_thd.data.read.tokenize import encode_long_record
from tests.data.chats import PLAIN, make_tokenizer

Small = Any


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Small:
    """Make every record of more than some bytes a long one, read in blocks of seven."""

    def use(long: int, block: int = 7) -> None:
        monkeypatch.setattr(values, "LONG_BYTES", long)
        monkeypatch.setattr(values, "_BLOCK", block)
        monkeypatch.setattr(values, "_SHORT", 5)
        monkeypatch.setattr(json_spans, "_BLOCK", block)

    return use


def opened(path: Path, folder: Path, **kwargs: Any) -> TokenStore:
    store = Opener(cache_dir=folder, **kwargs).open(path).dataset
    assert isinstance(store, TokenStore)
    return store


def content(store: TokenStore) -> list[Any]:
    assert store.loss_tokens.tolist() == [
        max(0, len(row["input_ids"]) - 1)
        if store.labels is None
        else int(np.count_nonzero(row["labels"][1:] != -100))
        for row in (store[i] for i in range(len(store)))
    ]
    highest = max((max([-1, *store[i]["input_ids"].tolist()]) for i in range(len(store))), default=-1)
    assert store.largest[0] == highest
    return [{name: values.tolist() for name, values in store[i].items()} for i in range(len(store))]


LINES = [
    {"text": "short"},
    {"text": 'a longer \u00e9\u4e2d\U0001f600 \\ " text \n with signs' * 4, "id": 7},
    {"id": [1, {"x": "}]"}], "text": "\U0001f600" * 30, "more": "y" * 40},
    {"text": ""},
    {"text": "z" * 100},
]


WAYS = [(ascii_only, block, 0) for ascii_only in (True, False) for block in (1, 7, 64)]


@pytest.mark.parametrize(("ascii_only", "block", "num_workers"), [*WAYS, (False, 7, 2)])
def test_lines_of_text(tmp_path: Path, small: Small, ascii_only: bool, block: int, num_workers: int) -> None:
    file = tmp_path / "a.jsonl"
    lines = [json.dumps(line, ensure_ascii=ascii_only) for line in LINES]
    file.write_text("\ufeff" + "\n".join(lines) + "\n\n")
    wanted = content(opened(file, tmp_path / "whole"))
    small(30, block)
    found = opened(file, tmp_path / "pieces", num_workers=num_workers)
    assert content(found) == wanted
    assert (tmp_path / "whole").exists()
    assert list(read_documents(file)) == [line["text"] for line in LINES]
    assert sum(isinstance(r, values.Long) for c in records.file_chunks(file) for _, r in c.records()) == 3


@pytest.mark.parametrize("labels", [False, True])
def test_lines_of_ids(tmp_path: Path, small: Small, labels: bool) -> None:
    rows: list[dict[str, Any]] = []
    for size in (3, 90, 1, 40, 0):
        row: dict[str, Any] = {"input_ids": [100 * size + k for k in range(size)]}
        if labels:
            row = {"labels": [-100 if k % 3 == 0 else k for k in range(size)], "x": "y", **row}
        rows.append({**row, "attention_mask": [1] * size})
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    wanted = content(opened(file, tmp_path / "whole"))
    assert [len(row["input_ids"]) for row in wanted] == [3, 90, 1, 40, 0]
    small(30)
    assert content(opened(file, tmp_path / "pieces")) == wanted


@given(text=st.text(min_size=20, max_size=80), other=st.text(max_size=30), block=st.integers(1, 40))
def test_any_text_between_any_keys(
    tmp_path_factory: pytest.TempPathFactory, text: str, other: str, block: int
) -> None:
    file = tmp_path_factory.mktemp("c") / "a.jsonl"
    text, other = (part.encode(errors="replace").decode() for part in (text, other))
    line = {"id": other, "text": text, other: [other, 1.5, None]}
    file.write_text(json.dumps(line, ensure_ascii=block % 2 == 0) + "\n" + json.dumps({"text": "b"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values, "LONG_BYTES", 10)
        patch.setattr(values, "_BLOCK", block)
        patch.setattr(values, "_SHORT", 5)
        patch.setattr(json_spans, "_BLOCK", block)
        [first, second] = [record for chunk in records.file_chunks(file) for _, record in chunk.records()]
        assert isinstance(first, values.Long)
        assert first.whole() == json.loads(json.dumps(line))
        assert second == {"text": "b"}


BAD = [
    '{"text": "' + "a" * 50,
    '{"text": "' + "a" * 50 + '"} more',
    '{"text": "' + "a" * 50 + '",}',
    '{"text": "' + "a" * 50 + "\\x" + 'a"}',
    '{"text": "' + "a" * 50 + "\t" + '"}',
    '{"text": "' + "a" * 50 + "\\ud800 half" + '"}',
    '{"text": ' + "1" * 50 + "}",
    '{"other": "' + "a" * 50 + '"}',
    '["' + "a" * 50 + '"]',
    '{"text" "' + "a" * 50 + '"}',
    '{1: "' + "a" * 50 + '"}',
    '{"text": ["' + "a" * 50 + '"]}',
    '{"text": "b", "id": ' + "x" * 50 + "}",
    '{"text": {"a": [' + "1, " * 20 + "}",
]
BAD_IDS = [
    '{"input_ids": [' + "1, " * 30 + "]}",
    '{"input_ids": [' + "1, " * 30 + "2.5]}",
    '{"input_ids": [' + "1, " * 30 + "true]}",
    '{"input_ids": [' + "1, " * 30 + "null]}",
    '{"input_ids": [' + "1, " * 30 + "-1]}",
    '{"input_ids": [' + "1, " * 30 + "2147483648]}",
    '{"input_ids": [[' + "1, " * 30 + "2]]}",
    '{"input_ids": "' + "1, " * 30 + '"}',
    '{"input_ids": {"a": ' + "1" * 30 + "}}",
    '{"input_ids": [' + "1, " * 30 + '2], "labels": [1, 2]}',
    '{"input_ids": [' + "1, " * 30 + '2], "weights": [1, 2]}',
    '{"input_ids": [' + "1, " * 30 + '2], "attention_mask": [' + "1, " * 30 + "0]}",
]


@pytest.mark.parametrize(
    ("line", "good"),
    [*((line, '{"text": "good"}') for line in BAD), *((line, '{"input_ids": [1, 2]}') for line in BAD_IDS)],
)
def test_bad_long_lines_are_refused_with_their_place_and_left_out(
    tmp_path: Path, small: Small, line: str, good: str
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f"{good}\n{line}\n{good}\n")
    for name in ("whole", "pieces"):
        with pytest.raises(ValueError, match=r"a\.jsonl, line 2: .*[.)]"):
            opened(file, tmp_path / name)
        store = opened(file, tmp_path / name, on_error="skip")
        assert (len(store), store.skipped) == (2, 1)
        assert store[0]["input_ids"].tolist() == store[1]["input_ids"].tolist()
        assert store.largest[0] <= 257
        small(30)


def test_labels_of_a_line_that_is_taken_back_leave_nothing(tmp_path: Path, small: Small) -> None:
    file = tmp_path / "a.jsonl"
    bad = {"input_ids": [7] * 40, "labels": [7] * 39}
    file.write_text("\n".join(map(json.dumps, [bad, {"input_ids": [1, 2]}, {"input_ids": [3]}])))
    small(30)
    store = opened(file, tmp_path / "c", on_error="skip")
    assert store.labels is None
    assert [store[i]["input_ids"].tolist() for i in range(2)] == [[1, 2], [3]]
    assert store.largest == (3, 1)


@pytest.mark.parametrize("tail", [b"", b"\xff", b"\xe4\xb8", b"\0"])
def test_text_files(tmp_path: Path, small: Small, tail: bytes) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.txt").write_bytes(b"\xef\xbb\xbf" + "caf\u00e9 \u4e2d ".encode() * 20 + tail)
    (tmp_path / "d" / "b.txt").write_text("short")
    wanted = content(opened(tmp_path / "d", tmp_path / "whole", on_error="skip"))
    assert len(wanted) == (1 if tail else 2)
    small(30)
    assert content(opened(tmp_path / "d", tmp_path / "pieces", on_error="skip")) == wanted
    if tail:
        with pytest.raises(ValueError, match=r"a\.txt: (not UTF-8 \(byte 0x.. at 2|holds a null byte at 1)"):
            opened(tmp_path / "d", tmp_path / "raised")


@pytest.mark.parametrize("suffix", [".arrow", ".parquet"])
def test_text_of_columns(tmp_path: Path, small: Small, suffix: str) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = ["short", "long \u4e2d\U0001f600" * 20, None, "b" * 99]
    kinds = [pa.string(), pa.large_string()]
    for kind in kinds:
        table = pa.table({"text": pa.array(texts, kind), "id": [1, 2, 3, 4]})
        file = tmp_path / f"{kind}{suffix}"
        if suffix == ".parquet":
            parquet.write_table(table, file, row_group_size=2)
        else:
            with pa.ipc.new_file(str(file), table.schema) as writer:
                for start in (0, 2):
                    writer.write_table(table.slice(start, 2))
        wanted = content(opened(file, tmp_path / f"w{kind}", on_error="skip"))
        assert len(wanted) == 3
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(values, "LONG_BYTES", 30)
            patch.setattr(values, "_BLOCK", 7)
            chunks = records.file_chunks(file)
            assert [isinstance(r, values.Long) for c in chunks for _, r in c.records()] == [0, 1, 0, 1]
            assert content(opened(file, tmp_path / f"p{kind}", on_error="skip")) == wanted
            assert next(iter(read_documents(file))) == "short"


@pytest.mark.parametrize("kind", ["fast", "function"])
@pytest.mark.parametrize("append_eos", [True, False])
def test_other_tokenizers(tmp_path: Path, small: Small, kind: str, append_eos: bool) -> None:
    tokenizer: Any = make_tokenizer(None) if kind == "fast" else lambda text: [ord(sign) for sign in text]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in LINES if line["text"]))
    how = {"tokenizer": tokenizer, "append_eos": append_eos}
    wanted = content(opened(file, tmp_path / "whole", **how))
    small(30)
    assert content(opened(file, tmp_path / "pieces", **how)) == wanted


def test_conversations_are_read_whole(tmp_path: Path, small: Small) -> None:
    talk = [{"role": "user", "content": "x" * 50}, {"role": "assistant", "content": "two"}]
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": talk}) + "\n")
    wanted = content(opened(file, tmp_path / "whole", tokenizer=make_tokenizer(PLAIN)))
    small(30)
    assert content(opened(file, tmp_path / "pieces", tokenizer=make_tokenizer(PLAIN))) == wanted


def test_pieces_grow_where_neighbours_agree_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer(None)
    text = (
        "two plus two is four, " * 40 + "a" * 700 + " blue and red" * 60 + "\U0001f600" * 300 + " is it" * 80
    )
    wanted = tokenizer(text)["input_ids"]
    for size in (150, 400, 1_000):
        parts = [text[at : at + 33] for at in range(0, len(text), 33)]
        found = np.concatenate([*encode_pieces(tokenizer, parts, piece=size, overlap=120)])
        assert found.tolist() == wanted
    monkeypatch.setattr(long_text, "_joint", lambda last, later: None)
    assert np.concatenate([*encode_pieces(tokenizer, [text], piece=150, overlap=50)]).tolist() == wanted


def test_pieces_that_cannot_be_joined_are_tokenised_whole(
    tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer(None)
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"text": "two plus two " * 9}) + "\n" + json.dumps({"text": "red"}))
    wanted = content(opened(file, tmp_path / "whole", tokenizer=tokenizer))

    def broken(tokenizer: Any, text: Any, **kwargs: Any) -> Any:
        yield np.array([1, 2, 3], np.int32)
        raise NoJoint

    small(30)
    monkeypatch.setattr("lightning_thd.data.read.encode.encode_pieces", broken)
    monkeypatch.setattr(long_text, "encode_pieces", broken)
    assert encode_long(tokenizer, "two plus").tolist() == tokenizer("two plus")["input_ids"]
    assert content(opened(file, tmp_path / "pieces", tokenizer=tokenizer)) == wanted
    assert callable(encode_long_record)


def test_tokenizers_that_cannot_be_given_pieces_are_known() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def fast(model: Any, cuts: Any) -> PreTrainedTokenizerFast:
        backend = Tokenizer(model)
        if cuts is not None:
            backend.pre_tokenizer = cuts
        return PreTrainedTokenizerFast(tokenizer_object=backend)

    assert can_cut(make_tokenizer(None))
    assert not can_cut(fast(models.BPE(dropout=0.1), None))
    unigram = models.Unigram([("a", -1.0), ("b", -2.0), (" ", -3.0)])
    assert can_cut(fast(unigram, pre_tokenizers.WhitespaceSplit()))
    assert not can_cut(fast(unigram, None))
    assert not can_cut(fast(unigram, pre_tokenizers.Metaspace(split=False)))
    assert not can_cut(lambda text: [1])


ENTRIES: dict[str, Any] = {
    "objects": [{"text": "short"}, {"text": "long \u4e2d\\ " * 9, "id": [1]}, {"text": ""}],
    "strings": ["short", "long " * 20, ""],
    "wrapped": {"version": {"a": "]"}, "data": [{"text": "b" * 40}, {"text": "c"}]},
    "one record": {"text": "long " * 20, "tags": ["x"]},
    "ids": [{"input_ids": [1, 2]}, {"input_ids": [*range(50)]}],
}


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("indent", [None, 2])
def test_json_files(tmp_path: Path, small: Small, name: str, indent: int | None) -> None:
    file = tmp_path / "a.json"
    file.write_text("\ufeff" + json.dumps(ENTRIES[name], indent=indent) + "\n")
    wanted = content(opened(file, tmp_path / "whole"))
    places = [str(place) for chunk in records.file_chunks(file) for place, _ in chunk.records()]
    small(30)
    chunks = records.file_chunks(file, chunk_bytes=1)
    assert [str(place) for chunk in chunks for place, _ in chunk.records()] == places
    assert content(opened(file, tmp_path / "pieces")) == wanted


@pytest.mark.parametrize(
    "text",
    [
        '[{"text": "' + "a" * 40,
        '[{"text": "' + "a" * 40 + '"},]',
        '[{"text": "a"}, 7, ' + "1" * 40 + "]",
        "x" * 40,
    ],
)
def test_large_json_files_that_are_none(tmp_path: Path, small: Small, text: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(text)
    for name in ("whole", "pieces"):
        with pytest.raises(ValueError, match=r"a\.json"):
            opened(file, tmp_path / name)
        small(30)
