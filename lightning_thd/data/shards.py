"""A packer and a folder -> shards of packs and a manifest, resuming where a killed run stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tqdm import tqdm

from lightning_thd._imports import require

if TYPE_CHECKING:
    from lightning_thd.data.pack import Packer

MANIFEST = "manifest.json"
_VERSION = 1


def write_shards(
    packer: Packer, folder: Path, shard_packs: int, *, engine: Literal["local", "ray"], progress: bool
) -> dict[str, int]:
    """Write all packs of a plan as ``shard-00000.parquet``, ... and ``manifest.json``, which comes last.

    Beside every shard that is there stands, in ``.done``, what it holds; a run after a kill writes the
    others.

    Returns:
        ``packs``, ``sequences``, ``real_tokens`` and ``slots``, added up over the shards.

    Raises:
        ValueError: for a folder that holds shards of other data or settings.
    """
    total = len(packer.planner)
    settings = {
        "version": _VERSION,
        "plan": packer.planner.fingerprint(),
        "boundaries": packer.boundaries,
        "shard_packs": shard_packs,
    }
    done = folder / ".done"
    done.mkdir(parents=True, exist_ok=True)
    _check_same(folder, done, settings)
    parts = [(k, at, min(at + shard_packs, total)) for k, at in enumerate(range(0, total, shard_packs))]
    left = [part for part in parts if not _is_done(folder, done, part[0])]
    with tqdm(total=len(parts), initial=len(parts) - len(left), unit="shard", disable=not progress) as bar:
        for k, counts in _written(packer, folder, left, engine):
            _write_json(done / f"{k:05d}.json", {"file": _name(k), **counts})
            bar.update()
    shards = [json.loads((done / f"{k:05d}.json").read_text()) for k, *_ in parts]
    counts = {
        name: sum(shard[name] for shard in shards) for name in ("packs", "sequences", "real_tokens", "slots")
    }
    _write_json(folder / MANIFEST, {**settings, **counts, "shards": shards})
    return counts


def _written(
    packer: Packer, folder: Path, parts: list[tuple[int, int, int]], engine: str
) -> Iterator[tuple[int, dict[str, int]]]:
    if engine == "local" or not parts:
        for k, first, last in parts:
            yield k, packer.write(folder / _name(k), first, last)
        return
    ray = require("ray", feature="engine='ray'")
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    shared = ray.put(packer)

    def one(given: Any, part: tuple[int, int, int]) -> tuple[int, dict[str, int]]:
        return part[0], given.write(folder.resolve() / _name(part[0]), part[1], part[2])

    remote = ray.remote(one)
    waiting = [remote.remote(shared, part) for part in parts]
    while waiting:
        [ready], waiting = ray.wait(waiting, num_returns=1)
        yield ray.get(ready)


def _name(k: int) -> str:
    return f"shard-{k:05d}.parquet"


def _is_done(folder: Path, done: Path, k: int) -> bool:
    return (done / f"{k:05d}.json").is_file() and (folder / _name(k)).is_file()


def _check_same(folder: Path, done: Path, settings: dict[str, Any]) -> None:
    kept = done / "settings.json"
    if kept.is_file():
        found = json.loads(kept.read_text())
        if found != settings:
            changed = [name for name, value in settings.items() if found.get(name) != value]
            raise ValueError(
                f"{folder} holds packs of other data or settings ({', '.join(changed)} changed). Give an "
                "empty folder, or delete this one."
            )
    elif any(folder.glob("*.parquet")):
        raise ValueError(f"{folder} holds .parquet files that are no packs of ours. Give an empty folder.")
    else:
        _write_json(kept, settings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(partial, path)
