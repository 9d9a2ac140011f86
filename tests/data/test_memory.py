"""One document of millions of tokens: what preparing and reading it takes, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

_JOB = """
import sys, threading
from pathlib import Path
from lightning_thd import THDDataModule
from tests.data.chats import make_tokenizer

file, cache, tokens = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
tokenizer = make_tokenizer(None) if sys.argv[4] == "fast" else None
if tokenizer is not None:
    tokenizer("warm up " * 1000)

def anonymous():  # pages of mapped files are the system's: it takes them back when it needs them
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

before, most, done = anonymous(), 0, threading.Event()

def watch():
    global most
    while not done.wait(0.002):
        most = max(most, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
data = THDDataModule(file, capacity=8_192, oversize="split", cache_dir=cache, tokenizer=tokenizer)
data.prepare_data()
data.setup("fit")
found = sum(batch.stats.real_tokens for batch in data.train_dataloader())
done.set()
watcher.join()
assert found >= tokens, found
print(most - before, found)
"""
_WORDS = "def salad(word): return word + 1\n"
_LINUX = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc"
)


def peak_mib(file: Path, tokens: int, tokenizer: str = "bytes") -> float:
    """Most anonymous memory, in MiB, above that of the process before it opens the file."""
    cache = file.with_suffix(".cache")
    command = [sys.executable, "-W", "ignore", "-c", _JOB, str(file), str(cache), str(tokens), tokenizer]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return int(printed[-2]) / 1024


def write_text(file: Path, size: int) -> None:
    text = _WORDS * (size // len(_WORDS))
    if file.suffix == ".txt":
        file.write_text(text)
    elif file.suffix == ".jsonl":
        file.write_text(json.dumps({"text": text}) + "\n")
    else:
        write_column(file, "text", [text])


def write_column(file: Path, name: str, rows: list[object]) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({name: rows})
    if file.suffix == ".parquet":
        parquet.write_table(table, file)
        return
    with pa.ipc.new_file(str(file), table.schema) as writer:
        writer.write_table(table)


@pytest.mark.slow
@_LINUX
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".arrow"])
@pytest.mark.parametrize("tokenizer", ["bytes", "fast"])
def test_memory_does_not_grow_with_a_document_of_text(tmp_path: Path, suffix: str, tokenizer: str) -> None:
    peaks = []
    for megabytes in (20, 60):
        file = tmp_path / f"a{megabytes}{suffix}"
        write_text(file, megabytes * 1_000_000)
        peaks.append(peak_mib(file, megabytes * 300_000, tokenizer))
    # Pieces of 1 MiB some times over, and what a fast tokenizer holds of an eighth of one.
    assert max(peaks) < 160, peaks
    assert peaks[1] - peaks[0] < 16, peaks


@pytest.mark.slow
@_LINUX
@pytest.mark.parametrize("suffix", [".jsonl", ".arrow"])
def test_memory_does_not_grow_with_a_document_of_ids(tmp_path: Path, suffix: str) -> None:
    peaks = []
    for millions in (4, 12):
        file = tmp_path / f"a{millions}{suffix}"
        if suffix == ".jsonl":
            file.write_text('{"input_ids": [7' + ", 12345" * (millions * 1_000_000 - 1) + "]}\n")
        else:
            write_column(file, "input_ids", [np.full(millions * 1_000_000, 12_345, np.int32)])
        peaks.append(peak_mib(file, millions * 1_000_000))
    assert max(peaks) < 100, peaks
    assert peaks[1] - peaks[0] < 16, peaks


@pytest.mark.slow
@_LINUX
@pytest.mark.parametrize("name", ["text", "input_ids"])
def test_memory_of_a_row_of_parquet_is_that_of_its_value(tmp_path: Path, name: str) -> None:
    file = tmp_path / "a.parquet"
    values = _WORDS * 300_000 if name == "text" else np.arange(5_000_000, dtype=np.int32) % 60_000
    write_column(file, name, [values])
    # pyarrow gives a value whole: its bytes some times over, of a page and a column.
    size = len(values) if isinstance(values, str) else values.nbytes
    assert peak_mib(file, 4_900_000) < 60 + 6 * size / 2**20
