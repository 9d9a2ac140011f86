"""A source of a stream -> its shards; a source that splits itself by rank -> an error."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

from torch.utils.data import IterableDataset

from lightning_thd.data.read.files import expand
from lightning_thd.data.streams.shards.base import Shard, Shards
from lightning_thd.data.streams.shards.files import file_shard
from lightning_thd.data.streams.shards.iterables import (
    Beginning,
    content_of,
    has_state,
    is_hf,
    is_iterator,
    iterable_shards,
)

_EMPTY = CellType()  # the cell of a name that was not bound yet
_MOST = 10_000  # entries of a list that are compared
_FIRST = "the first record"


def is_stream(source: object) -> bool:
    """Return whether a source can only be iterated: a dataset, a generator, a function that begins one."""
    if isinstance(source, str | Path):
        return False
    if isinstance(source, IterableDataset) or is_hf(source) or inspect.isgenerator(source):
        return True
    if isinstance(source, list | tuple):
        return bool(source) and all(map(is_stream, source))
    sized = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    return not sized and (callable(source) or hasattr(source, "__iter__"))


def open_shards(source: Any, *, parts: int) -> Shards:
    """Split a source into shards."""
    sources = source if isinstance(source, list | tuple) else [source]
    found: list[Shard] = []
    read_once: dict[str, Any] = {}
    replays = True
    for number, one in enumerate(sources):
        if isinstance(one, str | Path):
            found += [file_shard(name) for name in expand(one)]
            continue
        replays &= is_hf(one)
        found += iterable_shards(
            one, parts, prefix=f"{number}/" if len(sources) > 1 else "", read_once=read_once
        )
    if not found:
        raise ValueError("The stream has no shards: its source is an empty list. Pass at least one path.")
    return Shards(shards=found, replays=replays, read_once=read_once)


def traits(source: Any, *, first: bool = False) -> dict[str, Any]:
    """Collect what must be the same on all ranks: plain values of a source, and its first record."""
    held: dict[str, Any] = dict(getattr(source, "__dict__", {}))
    if isinstance(source, FunctionType):
        cells = zip(source.__code__.co_freevars, source.__closure__ or (), strict=True)
        held |= {name: cell.cell_contents for name, cell in cells if cell != _EMPTY}
    elif isinstance(source, partial):
        held |= {f"argument {i}": value for i, value in enumerate(source.args)} | source.keywords
    found = {
        name: value
        for name, value in held.items()
        if "device" not in name and (_is_plain(value) or _is_plain_list(value))
    }
    if first and not is_iterator(source):
        with contextlib.suppress(Exception):  # reading raises it again, with its place
            found[_FIRST] = _first_record(source)
    return found


def _first_record(source: Any) -> str | None:
    """Return a hash of the first record; None for a source that cannot be begun more than once."""
    if callable(source) and not isinstance(source, IterableDataset):
        source, other = source(), source()
        if source is other and is_iterator(source):
            return None
    if has_state(source):
        records = Beginning.of(source).again(source)
    elif (records := iter(source)) is iter(source):
        return None
    return hashlib.sha256(content_of(next(records, None))).hexdigest()[:12]


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | str)


def _is_plain_list(value: object) -> bool:
    return isinstance(value, list | tuple | range) and len(value) <= _MOST and all(map(_is_plain, value))


def refuse_split(read_once: Mapping[str, Any], of_ranks: list[dict[str, dict[str, Any]]]) -> None:
    """Refuse sources that one rank reads for all and that differ between ranks."""
    for name in read_once:
        first = of_ranks[0].get(name, {})
        for rank, found in enumerate(of_ranks):
            for key, value in found.get(name, {}).items():
                if key not in first or first[key] == value:
                    continue
                split = (
                    f"has another first record on rank {rank} than on rank 0, so it splits itself by rank, "
                    "or draws without a seed."
                    if key == _FIRST
                    else f"holds {key}={_short(first[key])} on rank 0 and {_short(value)} on rank {rank}, so "
                    "it was split by rank."
                )
                raise ValueError(
                    f"{name} {split} One rank reads it for all, and would give only its own part. Pass a "
                    "function make(part, parts) that begins one part, or give the dataset the attributes "
                    "data_rank and data_size; if it gives every record, make it the same on all ranks."
                )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
