"""A path -> a map-style dataset of token ids; text is tokenised once, into a memory-mapped store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from numpy.typing import NDArray

from lightning_thd._imports import require
from lightning_thd.data.index import MapDataset
from lightning_thd.data.store import TokenStore, cached_store
from lightning_thd.data.text import ByteTokenizer, read_documents

Tokenizer = Callable[[str], Sequence[int] | NDArray[np.integer]]


def open_source(
    path: str | Path,
    *,
    tokenizer: Tokenizer | str | None = None,
    text_key: str = "text",
    cache_dir: str | Path | None = None,
) -> MapDataset:
    """Open a path as a dataset of token ids.

    Args:
        path: ``.jsonl``, a text file or a folder of text files, tokenised; ``.parquet`` or ``.arrow`` with a
            column ``input_ids`` and perhaps ``labels``; or a folder written by ``TokenStore.save``.
        tokenizer: ``str -> ids``, the name of a Hugging Face tokenizer, or None for UTF-8 bytes.
        text_key: the key of the text in a JSONL object.
        cache_dir: where the tokenised text is kept.

    Raises:
        ValueError: for a path that does not exist or holds no such thing.
    """
    path = Path(path)
    if (path / "meta.json").is_file():
        return TokenStore.open(path)
    if path.suffix in (".parquet", ".arrow"):
        return _open_columns(path)
    encode, name = _load_tokenizer(tokenizer)
    files = sorted(path.rglob("*")) if path.is_dir() else [path] if path.exists() else []
    key = {
        "files": [
            (str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()
        ],
        "tokenizer": name,
        "text_key": text_key,
    }

    def build() -> TokenStore:
        rank_zero_info(f"Tokenising {path} with {name}")
        return TokenStore.from_rows(_encode(encode, text) for text in read_documents(path, text_key=text_key))

    if name is None:  # a function says nothing about itself, so nothing it made can be found again
        return TokenStore.from_rows(_encode(encode, text) for text in read_documents(path, text_key=text_key))
    return cached_store(key, build, cache_dir=cache_dir)


def _encode(encode: Tokenizer, text: str) -> Sequence[int] | NDArray[np.integer]:
    ids = encode(text)
    return cast("dict[str, Any]", ids)["input_ids"] if hasattr(ids, "keys") else ids


def _load_tokenizer(tokenizer: Tokenizer | str | None) -> tuple[Tokenizer, str | None]:
    if tokenizer is None or isinstance(tokenizer, ByteTokenizer):
        return ByteTokenizer(), "bytes"
    if isinstance(tokenizer, str):
        transformers = require("transformers", feature=f"tokenizer={tokenizer!r}")
        return transformers.AutoTokenizer.from_pretrained(tokenizer), tokenizer
    return tokenizer, getattr(tokenizer, "name_or_path", None) or None


def _open_columns(path: Path) -> MapDataset:
    if not path.is_file():
        raise ValueError(f"{path} does not exist. Give a .parquet or .arrow file with a column 'input_ids'.")
    datasets = require("datasets", feature=f"reading {path.suffix} files")
    if path.suffix == ".arrow":
        dataset = datasets.Dataset.from_file(str(path))
    else:
        dataset = datasets.Dataset.from_parquet(str(path))
    if "input_ids" not in dataset.column_names:
        raise ValueError(
            f"{path} has the columns {dataset.column_names} but no 'input_ids'. "
            "Rename the column of token ids."
        )
    keep = [name for name in ("input_ids", "labels") if name in dataset.column_names]
    return cast("MapDataset", dataset.select_columns(keep).with_format("numpy"))
