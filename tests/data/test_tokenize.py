"""Chunks cover a source once; streaming to disk, in any number of processes, gives what one pass gives."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_thd.data import ByteTokenizer
from lightning_thd.data.read.encode import Encoder, find_kind, tokenize
from lightning_thd.data.read.files import find_files
from lightning_thd.data.read.records import file_chunks, row_chunks
from lightning_thd.data.store.tokens import cached_store
from tests.data.support import open_source
from tests.scripts import run_python


@given(
    texts=st.lists(st.text(max_size=20), min_size=1, max_size=20),
    chunk_bytes=st.integers(1, 60),
    blank=st.booleans(),
)
def test_chunks_of_any_size_give_every_line_once(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], chunk_bytes: int, blank: bool
) -> None:
    file = tmp_path_factory.getbasetemp() / "chunks.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    file.write_text(("\n\n" if blank else "\n").join(lines), encoding="utf-8", errors="replace")
    chunks = file_chunks(find_files(file), chunk_bytes=chunk_bytes)
    found = [record for chunk in chunks for _, record in chunk()]
    assert found == [json.loads(line.encode(errors="replace")) for line in lines]
    places = [str(place) for chunk in chunks for place, _ in chunk()]
    assert places == [f"{file}, line {1 + i * (2 if blank else 1)}" for i in range(len(texts))]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_any_number_of_processes_gives_the_same_store(tmp_path: Path, num_workers: int) -> None:
    file = tmp_path / "d.jsonl"
    texts = [f"document {i} " * (i % 7) for i in range(500)]
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    tokenizer = ByteTokenizer()
    encoder = Encoder(tokenizer=tokenizer, kind="text")
    chunks = file_chunks(find_files(file), chunk_bytes=1000)
    parts = tokenize(chunks, encoder, num_workers=num_workers)
    store = cached_store(None, lambda first: parts, cache_dir=tmp_path)
    assert store.tokens.dtype == np.uint16
    assert [store[i]["input_ids"].tolist() for i in range(500)] == [tokenizer(t).tolist() for t in texts]


def test_an_error_in_a_process_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text('{"text": "a"}\n' * 300 + '{"text": 1}\n')
    with pytest.raises(ValueError, match=r"d\.jsonl, line 301: no string under the key 'text'"):
        open_source(file, num_workers=2)
    with pytest.raises(ValueError, match="The source has no record"):
        find_kind(row_chunks([]), records="auto", text_key="text", on_error="raise")


_MEASURE = """
import resource, sys
from tests.data.support import open_source
open_source(sys.argv[1], cache_dir=sys.argv[2])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store = open_source(sys.argv[3], cache_dir=sys.argv[2])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, len(store))
"""


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    small, large = tmp_path / "small.jsonl", tmp_path / "large.jsonl"
    line = json.dumps({"text": "x" * 10_000}) + "\n"
    small.write_text(line * 800)  # 8 MB: two chunks
    large.write_text(line * 4_000)  # 40 MB, 80 MB of ids
    grown, count = run_python("-c", _MEASURE, small, tmp_path / "c", large).split()
    assert int(count) == 4_000
    unit = 1024 if sys.platform != "darwin" else 1
    # 8 MB: a chunk here and there; holding the ids would take 80.
    assert int(grown) * unit < 30e6
