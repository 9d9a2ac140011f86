"""A source of a stream -> its shards."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from lightning_thd.data.streams.shards.adapters import is_mosaic, is_node
from lightning_thd.data.streams.shards.base import Shard, Shards
from lightning_thd.data.streams.shards.files import expanded, file_shard
from lightning_thd.data.streams.shards.iterables import is_hf, iterable_shards


def is_stream(source: object) -> bool:
    """Return whether a source can only be iterated: iterable datasets, generators, factories, tars."""
    if isinstance(source, str | Path):
        return str(source).endswith((".tar", ".tar.gz", ".tgz"))
    if isinstance(source, IterableDataset) or is_hf(source) or inspect.isgenerator(source):
        return True
    if is_node(source) or is_mosaic(source):
        return True
    if isinstance(source, list | tuple):
        return bool(source) and all(map(is_stream, source))
    sized = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    return not sized and (callable(source) or hasattr(source, "__iter__"))


def open_shards(source: Any, *, parts: int) -> Shards:
    """Split a source into shards.

    Args:
        source: paths and globs of ``.jsonl[.gz|.zst]``, ``.parquet``, ``.arrow`` and ``.tar`` files, in a
            list or alone, local or through fsspec; a Hugging Face or torch ``IterableDataset``; a MosaicML
            ``StreamingDataset``; a ``torchdata.nodes.BaseNode`` or ``Loader``; a function that begins an
            iterator, ``factory()`` or ``factory(part, parts)``; a list of such.
        parts: parts that a torch dataset with the attributes ``data_rank`` and ``data_size``, or a function
            of two arguments, is asked for.

    Raises:
        ValueError: for what is none of these, and for paths that do not exist.
    """
    sources = source if isinstance(source, list | tuple) else [source]
    found: list[Shard] = []
    alone: dict[str, Any] = {}
    replays = True
    for number, one in enumerate(sources):
        if isinstance(one, str | Path):
            found += [file_shard(name) for name in expanded(str(one))]
            continue
        replays &= is_hf(one) or is_mosaic(one)
        found += iterable_shards(one, parts, prefix=f"{number}/" if len(sources) > 1 else "", alone=alone)
    if not found:
        raise ValueError("The stream has no shards: its source is an empty list. Pass at least one path.")
    return Shards(shards=found, replays=replays, alone=alone)
