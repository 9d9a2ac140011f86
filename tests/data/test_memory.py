"""One document of millions of tokens: what preparing and reading it takes, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

_JOB = """
import sys
from pathlib import Path
from lightning_thd import THDDataModule
from tests.data.chats import make_tokenizer

file, cache, tokens = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
tokenizer = make_tokenizer(None) if sys.argv[4] == "fast" else None

def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = status("VmHWM")
data = THDDataModule(file, capacity=8_192, oversize="split", cache_dir=cache, tokenizer=tokenizer)
data.prepare_data()
data.setup("fit")
found = sum(batch.stats.real_tokens for batch in data.train_dataloader())
assert found >= tokens, found
print(status("VmHWM") - before, found)
"""
_WORDS = "def salad(word): return word + 1\n"


def _peak_mib(file: Path, cache: Path, tokens: int, tokenizer: str = "bytes") -> tuple[float, int]:
    command = [sys.executable, "-W", "ignore", "-c", _JOB, str(file), str(cache), str(tokens), tokenizer]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return int(printed[-2]) / 1024, int(printed[-1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
@pytest.mark.parametrize("tokenizer", ["bytes", "fast"])
def test_five_million_tokens_of_text(tmp_path: Path, suffix: str, tokenizer: str) -> None:
    file = tmp_path / f"a{suffix}"
    text = _WORDS * ((5_000_000 if tokenizer == "bytes" else 15_000_000) // len(_WORDS))
    if suffix == ".parquet":
        pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.table({"text": [text]}), file)
    else:
        escaped = text.replace("\n", "\\n")
        file.write_text(text if suffix == ".txt" else f'{{"text": "{escaped}"}}\n')
    peak, tokens = _peak_mib(file, tmp_path / "cache", 4_900_000, tokenizer)
    # The text some times over, 40 MiB of the tokenizer, 16 bytes a token of ids on their way to disk.
    assert peak < 6 * len(text) / 2**20 + 40 + 16 * tokens / 2**20, peak


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_five_million_ids(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.table({"input_ids": [np.full(5_000_000, 12_345, np.int32)]}), file)
    else:
        file.write_text('{"input_ids": [7' + ", 12345" * 4_999_999 + "]}\n")
    peak, tokens = _peak_mib(file, tmp_path / "cache", 5_000_000)
    # Parsed JSON holds a Python object a token; Arrow's values are mapped, not copied, but count as resident.
    assert peak < (72 if suffix == ".jsonl" else 28) * tokens / 2**20, peak
