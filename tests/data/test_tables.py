"""CSV and TSV files: cells are text, whatever they look like, and what is no table is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_thd import THDDataModule
from lightning_thd.data.read.sources import Opener

TABLES = {
    "numbers and nothing": ("a.csv", b"text,x\n12,1\nNA,2\n,3\nnull,4\n", ["12", "NA", "", "null"]),
    "byte-order mark": ("a.csv", b"\xef\xbb\xbftext,x\nhello,1\n", ["hello"]),
    "quoted line ends": ("a.csv", b'text,x\r\n"a\nb",1\r\nc,2\r\n', ["a\nb", "c"]),
    "quotes in quotes": ("a.csv", b'text,x\n"say ""no"", or yes",1\n', ['say "no", or yes']),
    "inch marks": ("a.csv", b'text,x\n5" pipe,1\n6" pipe,2\n', ['5" pipe', '6" pipe']),
    "tabs": ("a.tsv", b"x\ttext\n1\ta, b\n", ["a, b"]),
    "a column without a name": ("a.csv", b",text\n0,hi\n1,ho\n", ["hi", "ho"]),
    "a long cell": ("a.csv", b"text\n" + b"x" * 200_000 + b"\n", ["x" * 200_000]),
}


def texts(path: Path, **options: object) -> list[str]:
    dataset = Opener(append_eos=False, cache_dir=path.parent / "cache", **options).open(path).dataset
    rows = [dataset[i]["input_ids"].tolist() for i in range(len(dataset))]
    return [bytes(token for token in ids if token < 256).decode() for ids in rows]


@pytest.mark.parametrize("case", TABLES)
def test_cells_are_text(case: str, tmp_path: Path) -> None:
    name, content, wanted = TABLES[case]
    (tmp_path / name).write_bytes(content)
    assert texts(tmp_path / name) == wanted


def test_labels_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\nhi,1\nho,0\n")
    dataset = Opener(cache_dir=tmp_path / "cache").open(tmp_path / "a.csv").dataset
    assert [int(dataset[i]["label"]) for i in range(2)] == [1, 0]
    (tmp_path / "b.csv").write_text("label\n12\n")
    assert texts(tmp_path / "b.csv", text_key="label") == ["12"]


def test_a_changed_table_is_read_again(tmp_path: Path) -> None:
    for text in ("one", "two"):
        (tmp_path / "a.csv").write_text(f"text\n{text}\n")
        assert texts(tmp_path / "a.csv") == [text]


BROKEN = {
    "more cells than columns": b"text,x\na,1\nb,2,3\n",
    "more cells than columns in every row": b"text\nhi, ho\n",
    "fewer cells than columns": b"text,x\na\nb,2\n",
    "Latin-1": b"text,x\ncaf\xe9,2\n",
    "Latin-1 names": b"t\xe9xt\na\n",
    "one name twice": b"text,text\na,b\n",
    "an open quote": b'text,x\na,1\n"b,1\n',
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_table_is_refused_by_name(case: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(BROKEN[case])
    with pytest.raises(ValueError, match=r"a\.csv"):
        texts(tmp_path / "a.csv")


def test_tables_are_read_beside_tables_only(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\nhi\n")
    (tmp_path / "b.jsonl").write_text('{"text": "ho"}\n')
    files = [str(tmp_path / name) for name in ("a.csv", "b.jsonl")]
    with pytest.raises(ValueError, match="a.csv is a table, which is read beside tables only"):
        THDDataModule(files, capacity=64).setup("fit")
