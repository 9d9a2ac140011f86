"""Files, or Python's standard library -> documents as strings; a tokenizer that needs no files."""

from __future__ import annotations

import ast
import gc
import hashlib
import json
import sysconfig
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_thd._checks import flags, host_ints, whole_number
from lightning_thd.data.read.files import Paths, find_files
from lightning_thd.data.read.records import Bad, Record, file_chunks
from lightning_thd.data.store.tokens import TokenStore


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, then ``bos`` 256, ``eos`` 257, ``pad`` 258 and ``unk`` 259.

    ``ByteTokenizer()("hi")`` gives ``[104, 105, 257]``: every document ends with ``eos``.
    """

    fingerprint = "bytes"
    vocab_size = 260
    bos_token_id = 256
    eos_token_id = 257
    pad_token_id = 258
    unk_token_id = 259

    def __call__(self, text: str, add_special_tokens: bool = True) -> NDArray[np.uint16]:
        """Return uint16 ids ``[bytes + 1]``, or ``[bytes]`` without special tokens."""
        flags(add_special_tokens=add_special_tokens)
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.uint16)
        return np.append(ids, np.uint16(self.eos_token_id)) if add_special_tokens else ids

    def decode(self, ids: NDArray[np.integer]) -> str:
        """Return the text of ``ids``, without special ids."""
        values = host_ints(ids, "ids", least=0)
        return bytes(values[values < 256].astype(np.uint8)).decode("utf-8", errors="replace")


def read_documents(path: Paths, *, text_key: str = "text") -> Iterator[str]:
    """Yield the documents in files of text, or in files of records with text under a key.

    Args:
        path: as for ``THDDataModule``, but no table and no saved store; a text file is one document.
        text_key: the key of the text in a record.
    """
    for chunk in file_chunks(find_files(path)):
        for place, record in chunk():
            try:
                yield text_of(record, text_key)
            except ValueError as err:
                raise ValueError(f"{place}: {err}") from err


def text_of(record: Record, text_key: str) -> str:
    """Return the text of a record, which is a string or a dict."""
    if isinstance(record, Bad):
        raise ValueError(record.reason)
    text = record.get(text_key) if isinstance(record, dict) else record
    if isinstance(record, dict) and text_key in record and not isinstance(text, str):
        raise ValueError(f"the value of the key {text_key!r} is a {type(text).__name__}, not a string.")
    if not isinstance(text, str):
        keys = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"no string under the key {text_key!r}, found {keys}. Pass text_key=.")
    if "\0" in text:
        raise ValueError(f"the text has a null character at {text.index(chr(0))}. Remove the record.")
    return text


def stdlib_documents(*, max_bytes: int | None = None) -> list[str]:
    """Return every function and class, nested ones too, in the top-level modules of the standard library.

    Every Python has this text. Documents longer than ``max_bytes`` of UTF-8 are cut there.
    """
    if max_bytes is not None:
        whole_number(max_bytes, "max_bytes", least=1, advice="None leaves documents whole.")
    documents = _functions_and_classes()
    if max_bytes is None:
        return [*documents]
    # A character that is cut in the middle is left out.
    return [document.encode()[:max_bytes].decode(errors="ignore") for document in documents]


@cache
def _functions_and_classes() -> list[str]:
    documents: list[str] = []
    was_enabled = gc.isenabled()
    gc.disable()  # halves the time to parse
    try:
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            documents += _blocks_of(file.read_text(encoding="utf-8", errors="replace"))
    finally:
        if was_enabled:
            gc.enable()
    return documents


def _blocks_of(source: str) -> Iterator[str]:
    """Yield the functions and classes in Python code, outer ones first."""
    lines = source.splitlines(keepends=True)
    nodes: deque[ast.AST] = deque([ast.parse(source)])
    while nodes:
        node = nodes.popleft()
        for field in ("body", "handlers", "orelse", "finalbody", "cases"):  # fields with statements
            nodes.extend(getattr(node, field, ()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield "".join(lines[node.lineno - 1 : node.end_lineno])


def tokenizer_fingerprint(tokenizer: object) -> str | None:
    """Return a tokenizer's ``fingerprint``, or a hash of what decides a fast tokenizer's ids, or None."""
    fingerprint = getattr(tokenizer, "fingerprint", None)
    if fingerprint is not None:
        return str(fingerprint)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None

    settings = json.loads(backend.to_str())
    settings |= {"padding": None, "truncation": None}  # they are those of the last call
    parts = [
        json.dumps(settings),
        json.dumps(getattr(tokenizer, "chat_template", None), sort_keys=True, default=str),
        repr(getattr(tokenizer, "special_tokens_map", None)),
        repr(getattr(tokenizer, "split_special_tokens", None)),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class StdlibText(TokenStore):
    """``stdlib_documents(max_bytes=...)`` as ids of bytes: a data set of real text on every machine."""

    def __init__(self, *, max_bytes: int | None = 2048) -> None:
        store = TokenStore.from_rows(map(ByteTokenizer(), stdlib_documents(max_bytes=max_bytes)))
        super().__init__(store.tokens, store.offsets)
