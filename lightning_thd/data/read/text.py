"""Files, or Python's own standard library -> documents as strings; and a tokenizer that needs no files."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_thd.data.read.records import Place, Record, file_chunks
from lightning_thd.data.store.tokens import TokenStore


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, then ``bos`` 256, ``eos`` 257, ``pad`` 258 and ``unk`` 259.

    ``ByteTokenizer()("hi")`` gives ``[104, 105, 257]``: every document ends with ``eos``.
    """

    vocab_size = 260
    bos_token_id, eos_token_id, pad_token_id, unk_token_id = 256, 257, 258, 259

    def __repr__(self) -> str:
        return "ByteTokenizer()"

    def __call__(self, text: str, add_special_tokens: bool = True) -> NDArray[np.uint16]:
        """Return uint16 ids ``[bytes + 1]``, or ``[bytes]`` without special tokens."""
        ids = np.frombuffer(text.encode("utf-8", errors="replace"), np.uint8).astype(np.uint16)
        return np.append(ids, np.uint16(self.eos_token_id)) if add_special_tokens else ids

    def decode(self, ids: NDArray[np.integer]) -> str:
        """Return the text of ``ids``, special ids left out."""
        values = np.asarray(ids)
        return bytes(values[values < 256].astype(np.uint8)).decode("utf-8", errors="replace")


def read_documents(path: str | Path, *, text_key: str = "text") -> Iterator[str]:
    """Yield the documents of a JSONL file, of one text file, or of a folder of text files.

    Args:
        path: ``*.jsonl`` holds one JSON object a line; any other file is one document; a folder gives
            one document for every file below it with a text suffix, in sorted order.
        text_key: the key of the text in a JSONL object.

    Raises:
        ValueError: for a path that does not exist, a folder without text files, and a JSONL line that
            is no JSON object or lacks the key; the message names file and line.
    """
    for chunk in file_chunks(Path(path)):
        for place, record in chunk.records():
            yield text_of(place, record, text_key)


def text_of(place: Place, record: Record, text_key: str) -> str:
    """Take the text out of a record, which may be the text itself."""
    text = record.get(text_key) if isinstance(record, dict) else record
    if not isinstance(text, str):
        found = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise ValueError(
            f"{place}: no string under the key {text_key!r}, found {found}. "
            "Name the right key with text_key (--text-key on the command line)."
        )
    return text


def stdlib_documents(*, max_bytes: int | None = None) -> list[str]:
    """Return every function and class in the top-level modules of Python's standard library.

    Real text that every machine has: about 7,800 documents, median 290 bytes.

    Args:
        max_bytes: cut every document at this many bytes of UTF-8.
    """
    documents: list[str] = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = file.read_text(encoding="utf-8", errors="replace")
        lines = source.splitlines(keepends=True)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                text = "".join(lines[node.lineno - 1 : node.end_lineno])
                documents.append(text.encode()[:max_bytes].decode(errors="ignore") if max_bytes else text)
    return documents


class StdlibText(TokenStore):
    """``stdlib_documents`` as bytes: a data set of real text that every machine has.

    Args:
        max_bytes: cut every document at this many bytes.
    """

    def __init__(self, *, max_bytes: int | None = 2048) -> None:
        tokenize = ByteTokenizer()
        store = TokenStore.from_rows(tokenize(text) for text in stdlib_documents(max_bytes=max_bytes))
        super().__init__(store.tokens, store.offsets)
