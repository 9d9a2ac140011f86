"""Shards -> an error naming the first whose records cannot be read by number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_thd.data.streams.shards import Shard
from lightning_thd.data.streams.shards.adapters import is_mosaic

_FRONT_TO_BACK = {
    ".gz": "gzip is unpacked from its beginning",
    ".tgz": "gzip is unpacked from its beginning",
    ".zst": "zstd is unpacked from its beginning",
    ".tar": "a tar has no table of contents",
}
_ARROW_FILE = b"ARROW1"


def refuse_source(source: Any) -> None:
    """Refuse a source whose name or type shows that it can only be read front to back.

    Raises:
        ValueError: naming it.
    """
    for one in source if isinstance(source, list | tuple) else [source]:
        if isinstance(one, str | Path):
            _refuse_suffix(str(one))
        elif not is_mosaic(one):
            raise _refusal(f"a {type(one).__name__}", "it gives its records one after the other")


def check_access(shards: Sequence[Shard]) -> None:
    """Refuse shards if any of them cannot be read by record number.

    Raises:
        ValueError: naming it.
    """
    for shard in shards:
        _refuse_suffix(shard.name)
        if shard.name.endswith(".arrow") and "://" not in shard.name:
            with Path(shard.name).open("rb") as file:
                if file.read(len(_ARROW_FILE)) != _ARROW_FILE:
                    raise _refusal(shard.name, "it is an Arrow stream; an Arrow file has a table of contents")


def _refuse_suffix(name: str) -> None:
    why = _FRONT_TO_BACK.get(Path(name).suffix)
    if why is not None:
        raise _refusal(name, why)


def _refusal(name: str, why: str) -> ValueError:
    return ValueError(
        f"cache_lengths=True reads records by number from the second epoch on, which {name} does not allow: "
        f"{why}. Pass .jsonl, .parquet or .arrow files, or leave cache_lengths out."
    )
