"""Chunks of records x an encoder -> the pieces of a token store, in order, on several processes if asked."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from tqdm import tqdm

from lightning_thd.data.read.encode import Encoder, Tokenizer, kind_of
from lightning_thd.data.read.records import Chunk
from lightning_thd.data.store.tokens import Rows


class _Encoded(TorchDataset[Rows]):
    def __init__(self, chunks: Sequence[Chunk], encoder: Encoder) -> None:
        self._chunks, self._encoder = chunks, encoder

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, i: int) -> Rows:
        return self._encoder.encode(self._chunks[i].records())


def tokenize(
    chunks: Sequence[Chunk],
    tokenizer: Tokenizer,
    *,
    text_key: str = "text",
    append_eos: bool = True,
    num_workers: int = 0,
    progress: bool = False,
) -> Iterator[Rows]:
    """Encode chunk after chunk; memory holds a few chunks, whatever the size of the source.

    Args:
        chunks: of one source, all records of one kind.
        tokenizer: see ``encode.Encoder``.
        text_key: the key of the text in a record.
        append_eos: see ``encode.Encoder``.
        num_workers: processes that read and encode; the order stays.
        progress: show a bar.

    Raises:
        ValueError: for a source without records, and for a record that cannot be encoded.
    """
    first = next(chain.from_iterable(chunk.records() for chunk in chunks), None)
    if first is None:
        raise ValueError("The source has no record. Give at least one line, file or row.")
    encoder = Encoder(
        tokenizer=tokenizer, kind=kind_of(*first, text_key), text_key=text_key, append_eos=append_eos
    )
    loader = DataLoader(
        _Encoded(chunks, encoder),
        batch_size=None,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        worker_init_fn=_one_thread if num_workers else None,
    )
    yield from tqdm(loader, desc="Tokenising", unit="chunk", disable=not progress)


def _as_it_is(rows: Any) -> Any:
    return rows


def _one_thread(worker: int) -> None:
    # Every process has a core of its own, and the threads of a forked tokenizer would not be there.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
