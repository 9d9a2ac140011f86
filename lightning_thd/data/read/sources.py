"""A path, or a dataset of anything -> a map-style dataset of token ids, and what its content is known by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lightning_thd._imports import require
from lightning_thd.data.read.encode import Tokenizer, load_tokenizer, tokenizer_fingerprint
from lightning_thd.data.read.prepacked import holds_packs, open_packed
from lightning_thd.data.read.records import Chunk, file_chunks, row_chunks
from lightning_thd.data.read.tokenize import tokenize
from lightning_thd.data.store.columns import arrow_table, is_list
from lightning_thd.data.store.index import MapDataset
from lightning_thd.data.store.tokens import TokenStore, cached_store

Source = MapDataset | Dataset | str | Path  # type: ignore[type-arg]  # jsonargparse wants it bare
Packed = Literal["auto", "sequences", "packs", "off"]

_COLUMNS = (
    "input_ids",
    "labels",
    "lengths",
    "seq_lengths",
    "cu_seqlens",
    "cu_seqlens_padded",
    "position_ids",
    "attention_mask",
)
_SHOW_FROM = 2  # chunks: a bar for less is noise


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A dataset that is ready to be counted and packed.

    Attributes:
        dataset: gives ids, sequence by sequence.
        key: what its content is known by, for caches; None where nothing tells.
        schedule: ints ``[N]``, the ready pack of each sequence, where rows are kept as packs.
    """

    dataset: MapDataset
    key: dict[str, Any] | None
    schedule: NDArray[np.int64] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Opener:
    """How sources are opened.

    Attributes:
        tokenizer: ``str -> ids``, the name of a Hugging Face tokenizer, or None for UTF-8 bytes.
        text_key: the key of the text in a JSONL object or a row.
        append_eos: end documents and completions with the tokenizer's EOS.
        packed: what rows that hold several sequences become, see ``THDDataModule``.
        cache_dir: where what was made of a source is kept.
        num_workers: processes that tokenise and count.
        progress: show progress bars.
    """

    tokenizer: Tokenizer | str | None = None
    text_key: str = "text"
    append_eos: bool = True
    packed: Packed = "auto"
    cache_dir: str | Path | None = None
    num_workers: int = 0
    progress: bool = False

    def open(self, source: Source) -> Opened:
        """Open a path or a dataset; text, prompts and conversations are tokenised into a memory-mapped store.

        Raises:
            ValueError: for a path that does not exist, and for what holds no such thing.
        """
        if isinstance(source, str | Path):
            opened = self._open_path(Path(source))
        else:
            opened = self._open_dataset(cast("MapDataset", source))
        if self.packed == "off" or not holds_packs(opened.dataset, sure=self.packed != "auto"):
            return opened
        rows = open_packed(
            opened.dataset,
            num_workers=self.num_workers,
            progress=self.progress,
            key=opened.key,
            cache_dir=self.cache_dir,
        )
        key = None if opened.key is None else {**opened.key, "packed": "sequences"}
        return Opened(dataset=rows, key=key, schedule=rows.row if self.packed == "packs" else None)

    def _open_path(self, path: Path) -> Opened:
        if (path / "meta.json").is_file():
            store = TokenStore.open(path)
            return Opened(dataset=store, key={"store": store.fingerprint})
        if (shards := _shards(path)) is not None:
            dataset = _open_columns(path, shards, self.text_key)
            return self._open_dataset(dataset, key={"files": [_stamp(file) for file in shards]})
        files = sorted(path.rglob("*")) if path.is_dir() else [path] if path.exists() else []
        stamps = [_stamp(file) for file in files if file.is_file()]
        return self._tokenised(file_chunks(path), {"files": stamps}, str(path))

    def _open_dataset(self, dataset: MapDataset, key: dict[str, Any] | None = None) -> Opened:
        key = key or dataset_key(dataset)
        if len(dataset) == 0 or "input_ids" in (sample := dataset[0]) or not _is_raw(sample, self.text_key):
            return Opened(dataset=as_numpy(dataset), key=key)
        return self._tokenised(row_chunks(dataset), key, f"{len(dataset):,} rows")

    def _tokenised(self, chunks: list[Chunk], key: dict[str, Any] | None, name: str) -> Opened:
        encode = load_tokenizer(self.tokenizer)
        known = tokenizer_fingerprint(encode)
        how = {"tokenizer": known, "text_key": self.text_key, "append_eos": self.append_eos}

        def parts() -> Any:
            rank_zero_info(f"Tokenising {name} with {getattr(encode, 'name_or_path', '') or encode!r:.60}")
            return tokenize(
                chunks,
                encode,
                text_key=self.text_key,
                append_eos=self.append_eos,
                num_workers=min(self.num_workers, len(chunks)),
                progress=self.progress and len(chunks) >= _SHOW_FROM,
            )

        whole = None if key is None or known is None else {**key, **how}
        return Opened(dataset=cached_store(whole, parts, cache_dir=self.cache_dir), key=whole)


def open_source(
    path: str | Path,
    *,
    tokenizer: Tokenizer | str | None = None,
    text_key: str = "text",
    cache_dir: str | Path | None = None,
    num_workers: int = 0,
) -> MapDataset:
    """Open a path as a dataset of token ids.

    Args:
        path: ``.jsonl``, a text file or a folder of text files, tokenised; ``.parquet`` or ``.arrow`` with a
            column ``input_ids`` and perhaps ``labels``, or with text, prompts or conversations; or a folder
            written by ``TokenStore.save``.
        tokenizer: ``str -> ids``, the name of a Hugging Face tokenizer, or None for UTF-8 bytes.
        text_key: the key of the text in a JSONL object.
        cache_dir: where the tokenised text is kept.
        num_workers: processes that tokenise.

    Raises:
        ValueError: for a path that does not exist or holds no such thing.
    """
    opener = Opener(tokenizer=tokenizer, text_key=text_key, cache_dir=cache_dir, num_workers=num_workers)
    return opener.open(path).dataset


def is_known(source: object) -> bool:
    """Say whether the content of a source is known by something, so that what is made of it can be kept."""
    return isinstance(source, str | Path) or dataset_key(source) is not None


def dataset_key(dataset: object) -> dict[str, Any] | None:
    """Tell what the content of a dataset is known by: its ``fingerprint``, or the one Hugging Face gives."""
    for name in ("fingerprint", "_fingerprint"):
        value = getattr(dataset, name, None)
        if callable(value):
            value = value()
        if value is not None:
            return {"fingerprint": str(value), "type": type(dataset).__qualname__}
    return None


def as_numpy(dataset: MapDataset) -> MapDataset:
    """Let a Hugging Face dataset of ids give arrays in the place of lists of the same numbers."""
    table = arrow_table(dataset)
    if table is None or (getattr(dataset, "format", None) or {}).get("type") is not None:
        return dataset
    if not all(is_list(table, name) for name in cast("Any", dataset).column_names):
        return dataset
    return cast("MapDataset", cast("Any", dataset).with_format("numpy"))


def _is_raw(sample: object, text_key: str) -> bool:
    if isinstance(sample, str):
        return True
    return isinstance(sample, dict) and bool({text_key, "messages", "prompt"} & set(sample))


def _stamp(file: Path) -> tuple[str, int, int]:
    status = file.stat()
    return str(file.resolve()), status.st_size, status.st_mtime_ns


def _shards(path: Path) -> list[Path] | None:
    """Files of columns behind a path; None where there are none."""
    if path.suffix in (".parquet", ".arrow") and not path.is_dir():
        return [path] if path.is_file() else []
    if not path.is_dir():
        return None
    found = sorted(file for file in path.iterdir() if file.suffix in (".parquet", ".arrow"))
    return found or None


def _open_columns(path: Path, shards: list[Path], text_key: str) -> MapDataset:
    if not shards:
        raise ValueError(f"{path} does not exist. Give a .parquet or .arrow file with a column 'input_ids'.")
    datasets = require("datasets", feature=f"reading {shards[0].suffix} files")
    if (path / "state.json").is_file():
        dataset = datasets.load_from_disk(str(path))
    elif shards[0].suffix == ".arrow":
        dataset = datasets.concatenate_datasets([datasets.Dataset.from_file(str(file)) for file in shards])
    else:
        dataset = datasets.Dataset.from_parquet([str(file) for file in shards])
    if "input_ids" not in dataset.column_names:
        if _is_raw(dict.fromkeys(dataset.column_names), text_key):
            return cast("MapDataset", dataset)
        raise ValueError(
            f"{path} has the columns {dataset.column_names} but no 'input_ids'. "
            "Rename the column of token ids."
        )
    keep = [name for name in _COLUMNS if name in dataset.column_names]
    return cast("MapDataset", dataset.select_columns(keep))
