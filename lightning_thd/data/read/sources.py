"""A path, or a dataset of records of any kind -> a map-style dataset of token ids, and a cache key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lightning_thd._checks import choice, instance, whole_number
from lightning_thd.data.read.by_number import RecordsByNumber, RowsByNumber
from lightning_thd.data.read.columns import as_rows, hold_ids, load_columns, table_chunks
from lightning_thd.data.read.conversations import Records, kind_of
from lightning_thd.data.read.encode import Encoder, Tokenizer, find_kind, load_tokenizer, tokenize
from lightning_thd.data.read.files import KINDS, Paths, SourceFile, find_files, is_paths, refuse_blank
from lightning_thd.data.read.message_keys import check_metadata_keys
from lightning_thd.data.read.prepacked import holds_packs, open_packed
from lightning_thd.data.read.records import Chunk, RecordPlaces, file_chunks, part_sizes, row_chunks
from lightning_thd.data.read.text import tokenizer_fingerprint
from lightning_thd.data.read.vision_chat import ChatRows, VisionChat
from lightning_thd.data.store.columns import is_hugging_face
from lightning_thd.data.store.index import MapDataset, OnError, Places, mapping_or_text
from lightning_thd.data.store.tokens import Rows, TokenStore, cached_store

# Path is last, or jsonargparse would save any value in a config as a Path. Dataset has no type argument,
# because jsonargparse makes no object of such a type.
Source = MapDataset | Dataset | list[str | Path] | str | Path  # type: ignore[type-arg]
Packed = Literal["auto", "sequences", "packs", "off"]

_READER = 15  # part of cache keys; raise it when reading gives other tokens or refuses other records
_SHOW_FROM = 2  # Fewer chunks show no progress bar.


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A dataset of ids that is ready to be counted and packed."""

    dataset: MapDataset  # ``[i]`` gives the ids of a sequence
    key: dict[str, Any] | None  # the cache key of the content; None without a fingerprint
    schedule: NDArray[np.int64] | None = None  # the index of each sequence's pack, if rows are ready packs
    # The files of the rows, or the records of files that they were read from.
    places: Places = field(default_factory=Places)


@dataclass(frozen=True, kw_only=True, slots=True)
class Opener:
    """Opens sources as datasets of ids; ``THDDataModule`` documents the attributes."""

    tokenizer: Tokenizer | str | None = None
    processor: Any = None
    text_key: str = "text"
    append_eos: bool = True
    records: Records = "auto"
    metadata_keys: Sequence[str] = ()
    packed: Packed = "auto"
    on_error: OnError = "raise"
    max_errors: int | None = 1000
    cache_dir: str | Path | None = None
    num_workers: int = 0
    progress: bool = False

    def __post_init__(self) -> None:
        for name, words in {"records": Records, "packed": Packed, "on_error": OnError}.items():
            choice(getattr(self, name), name, *get_args(words))
        whole_number(self.num_workers, "num_workers", advice="It is the number of processes that read.")
        if self.max_errors is not None:
            whole_number(self.max_errors, "max_errors", advice="None sets no bound.")
        if self.processor is not None and self.tokenizer is not None:
            raise ValueError("Both tokenizer= and processor= were given. Leave tokenizer= out.")
        instance(self.text_key, "text_key", str, advice="Pass the key of the text in a record.")
        check_metadata_keys(self.metadata_keys)

    def open(self, source: Source | Paths) -> Opened:
        """Open paths or a dataset; without ``processor``, text and chats are tokenised into a store."""
        if is_paths(source):
            opened = self._open_paths(cast("Paths", source))
        else:
            opened = self._open_dataset(as_dataset(source))
        is_rendered = isinstance(opened.dataset, ChatRows)
        if is_rendered or self.packed == "off":
            return opened
        if not holds_packs(opened.dataset, sure=self.packed != "auto"):
            return opened

        rows = open_packed(opened.dataset, key=opened.key, cache_dir=self.cache_dir)
        key = None if opened.key is None else {**opened.key, "packed": "sequences"}
        return Opened(dataset=rows, key=key, schedule=rows.row if self.packed == "packs" else None)

    def first_record(self, source: Source | Paths) -> Any:
        """Return a source's first record, before tokenising; None for a store's folder or an empty source."""
        if not is_paths(source):
            dataset = as_dataset(source)
            return dataset[0] if len(dataset) else None
        if _store_folder(source) is not None:
            return None

        files = find_files(cast("Paths", source), cache_dir=self.cache_dir)
        records = (record for chunk in self._chunks(files) for _, record in chunk())
        return next(records, None)

    def _open_paths(self, source: Paths) -> Opened:
        """Open a saved store, or files of any kind."""
        folder = _store_folder(source)
        if folder is not None:
            store = TokenStore.open(folder)
            return Opened(dataset=store, key={"store": store.fingerprint})

        files = find_files(source, cache_dir=self.cache_dir)
        refuse_blank(files)
        if self.processor is not None:
            return self._open_rendered(files)

        key = {"files": [file.content for file in files], "suffixes": [file.suffix for file in files]}
        may_hold_ids = self.records in ("auto", "ids") and _are_all(files, "column")
        if may_hold_ids and hold_ids(files, self.text_key):
            rows = as_rows(load_columns(files, self.cache_dir))
            places = Places.of_files([file.name for file in files], [sum(part_sizes(file)) for file in files])
            return Opened(dataset=rows, key=key, places=places)
        chunks = self._chunks(files)
        opened = self._tokenised(chunks, key)
        store = cast("TokenStore", opened.dataset)
        return replace(opened, places=Places(names=(RecordPlaces(chunks, store),), ends=(len(store),)))

    def _open_rendered(self, files: list[SourceFile]) -> Opened:
        """Open files of conversations that the processor renders."""
        # The names count, because relative paths of images start at the folders of the files.
        key = {"files": [file.content for file in files], "names": [file.name for file in files]}
        if not _are_all(files, "column"):
            return self._rendered(RecordsByNumber(files), key)
        rows = [sum(part_sizes(file)) for file in files]
        return self._rendered(RowsByNumber(load_columns(files, self.cache_dir), files, rows), key)

    def _chunks(self, files: list[SourceFile]) -> list[Chunk]:
        """Cut files into chunks of records that any process can read."""
        if self.processor is None and _are_all(files, "table"):
            return [chunk for file in files for chunk in table_chunks(file, self.text_key, self.cache_dir)]
        return file_chunks(files)

    def _open_dataset(self, dataset: MapDataset) -> Opened:
        """Open a dataset of ids as it is, and tokenise or render one of text or conversations."""
        key = dataset_key(dataset)
        if len(dataset) == 0:
            return Opened(dataset=dataset, key=key)

        first: Any = dataset[0]
        if self.records == "ids" or not self._is_raw(first):
            return Opened(dataset=as_rows(dataset), key=key)
        if self.processor is not None:
            return self._rendered(RowsByNumber(dataset), key)
        return self._tokenised(row_chunks(dataset), key)

    def _is_raw(self, record: Any) -> bool:
        """Return whether a record is text or a conversation, and no ids."""
        if isinstance(record, str):
            return True
        if not isinstance(record, dict):
            return False
        return self.records not in ("auto", "ids") or kind_of(record, self.text_key) != "ids"

    def _rendered(self, records: Any, key: dict[str, Any] | None) -> Opened:
        """Let the processor render records when they are read; ``records`` gives them by number."""
        chat = VisionChat(self.processor, self.records, self.metadata_keys)
        processor = chat.fingerprint()
        rows = cast("MapDataset", ChatRows(records, chat))
        if key is None or processor is None:
            return Opened(dataset=rows, key=None)
        return Opened(dataset=rows, key={**key, "processor": processor})

    def _tokenised(self, chunks: list[Chunk], key: dict[str, Any] | None) -> Opened:
        """Tokenise chunks of records into a store in the cache, or open it there."""
        tokenizer = load_tokenizer(self.tokenizer)
        fingerprint = tokenizer_fingerprint(tokenizer)
        settings = {
            "tokenizer": fingerprint,
            "text_key": self.text_key,
            "append_eos": self.append_eos,
            "metadata_keys": ",".join(sorted(self.metadata_keys)),
            "records": self.records,
            "on_error": self.on_error,
            "reader": str(_READER),
        }

        def parts(first: int) -> Iterator[Rows]:
            kind = find_kind(chunks, records=self.records, text_key=self.text_key, on_error=self.on_error)
            encoder = Encoder(
                tokenizer=tokenizer,
                kind=kind,
                text_key=self.text_key,
                append_eos=self.append_eos,
                on_error=self.on_error,
                metadata_keys=self.metadata_keys,
                only_text=self.records == "text",
            )

            rank_zero_info(f"Tokenising {kind!r} records. Set another kind by records=.")
            return tokenize(
                chunks[first:],
                encoder,
                num_workers=self.num_workers,
                progress=self.progress and len(chunks) >= _SHOW_FROM,
            )

        store_key = None if key is None or fingerprint is None else {**key, **settings}
        store = cached_store(store_key, parts, cache_dir=self.cache_dir, max_errors=self.max_errors)
        return Opened(dataset=store, key=store_key)


def _are_all(files: Sequence[SourceFile], kind: str) -> bool:
    return all(KINDS.get(file.suffix) == kind for file in files)


def _store_folder(source: Any) -> Path | None:
    """Return the folder of a saved ``TokenStore`` if a source is its path, else None."""
    if not isinstance(source, str | Path):
        return None
    folder = Path(source).expanduser()
    is_store = all((folder / name).is_file() for name in ("meta.json", "tokens.npy"))
    return folder if is_store else None


def as_dataset(source: Any) -> MapDataset:
    """Return a source that is a map-style dataset of samples; raise for anything else."""
    if isinstance(source, Mapping) or hasattr(source, "iloc"):  # a dict of splits or columns, a DataFrame
        raise TypeError(
            f"A {type(source).__name__} with the keys {list(source)[:8]} is not a dataset. "
            "Pass one of its splits, or its rows as a list of dicts."
        )
    dataset = cast("MapDataset", source)
    if len(dataset):
        mapping_or_text(dataset[0], 0)
    return dataset


def is_known(source: object) -> bool:
    """Return whether a source's content has a fingerprint, so that results can be cached."""
    return is_paths(source) or dataset_key(source) is not None


def dataset_key(dataset: object) -> dict[str, Any] | None:
    """Return the cache key of a dataset: its ``fingerprint``, or Hugging Face's; None without either."""
    # An attribute of a wrapped dataset, which __getattr__ passes on, does not count.
    has_one = "fingerprint" in getattr(dataset, "__dict__", ()) or hasattr(type(dataset), "fingerprint")
    value = getattr(dataset, "fingerprint", None) if has_one else None
    if callable(value):
        value = value()
    if value is None and is_hugging_face(dataset):
        value = getattr(dataset, "_fingerprint", None)
    if value is None:
        return None
    return {"fingerprint": str(value), "type": type(dataset).__qualname__}
