"""Streams that ranks of tests read: shards on disk, their sequences by id, and loops over loaders."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from lightning_thd import Packs, Sequences, THDDataModule
from lightning_thd.batch import THDStep
from lightning_thd.data.streams import Stream
from tests.tiny import sequences

ROW_BITS = 40


def write_shards(
    folder: Path, sizes: list[int], *, labels: bool = False, seed: int = 0, longest: int = 24
) -> None:
    """Write JSONL shards whose tokens tell where they are from, so that none can be mixed up."""
    rng = np.random.default_rng(seed)
    for shard, size in enumerate(sizes):
        with (folder / f"{shard:03}.jsonl").open("w") as file:
            for row in range(size):
                length = int(rng.integers(2, longest + 1))
                ids = [(shard * 31 + row * 7 + i) % 64 for i in range(length)]
                record: dict[str, Any] = {"input_ids": ids}
                if labels:
                    record["labels"] = [i if rng.random() < 0.6 else -100 for i in ids]
                file.write(json.dumps(record) + "\n")


def write_samples(folder: Path, count: int = 60, shards: int = 3) -> list[dict[str, Any]]:
    """Write sequences with labels to shards, in turn, and return them in their order."""
    samples = sequences(count, labels=True)
    for shard in range(shards):
        rows = ({key: value.tolist() for key, value in one.items()} for one in samples[shard::shards])
        (folder / f"{shard}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return samples


def samples_of(
    samples: list[dict[str, Any]], steps: list[list[int]], shards: int = 3
) -> list[list[dict[str, Any]]]:
    """Return what ``write_samples`` wrote under the ids of every step."""
    row = (1 << ROW_BITS) - 1
    return [[samples[(i >> ROW_BITS) + shards * (i & row)] for i in ids] for ids in steps]


def read_shards(folder: Path) -> dict[int, dict[str, Any]]:
    """Read every sequence by its id, shard after shard."""
    records = {}
    for shard, file in enumerate(sorted(folder.glob("*.jsonl"))):
        for row, line in enumerate(file.read_text().splitlines()):
            records[shard << ROW_BITS | row] = json.loads(line)
    return records


def module(
    source: Any, *, capacity: int = 64, n: int = 12, packs: bool = False, **kwargs: Any
) -> THDDataModule:
    """Make a data module, of this rank where there is a job; a dict of sources and weights is a mixture."""
    stream = {"window": 16} | {k: kwargs.pop(k) for k in [*kwargs] if k in Stream.__dataclass_fields__}
    parts = source if isinstance(source, dict) else {"": (source, 1.0)}
    streams = {name: (Stream(source=one, **stream), weight) for name, (one, weight) in parts.items()}
    data = THDDataModule(
        streams if isinstance(source, dict) else streams[""][0],
        capacity=capacity,
        global_batch=Packs(n) if packs else Sequences(n),
        **kwargs,
    )
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    data.attach(rank=dist.get_rank() if ranks > 1 else 0, ranks=ranks, accumulate=n // ranks if packs else 1)
    return data


def describe(step: THDStep) -> dict[str, Any]:
    """Tell what a step holds in plain values."""
    return {
        "ids": [batch.sequence_ids for batch in step.microbatches],
        "tokens": [[row.tolist() for row in batch.unpack(batch.input_ids)] for batch in step.microbatches],
        "targets": [[row.tolist() for row in batch.unpack(batch.targets)] for batch in step.microbatches],
        "scale": step.microbatches[0].loss_scale,
        "slots": [len(batch.input_ids) for batch in step.microbatches],
    }


def run(source: Any, *, steps: int | None = None, state: Any = None, epochs: int = 1, **kwargs: Any) -> Any:
    """Run a loader; return what every step held, and the state after the last."""
    loader = module(source, **kwargs).train_steps()
    if state is not None:
        loader.load_state_dict(state)
    every = (step for _ in range(epochs) for step in loader)
    seen = [describe(step) for step in itertools.islice(every, steps)]
    return seen, loader.state_dict()


def caught(source: Any, **kwargs: Any) -> str:
    """Run a loader; return the error that ends it, or the number of its steps."""
    try:
        return f"{len(run(source, **kwargs)[0])} steps"
    except (ValueError, TypeError, RuntimeError) as err:
        return f"{type(err).__name__}: {err}"


def counted(ranks: list[Any]) -> Counter[int]:
    """Count the uses of every sequence over ranks and steps."""
    return Counter(i for seen, *_ in ranks for step in seen for batch in step["ids"] for i in batch)


def check_content(ranks: list[Any], wanted: dict[int, dict[str, Any]], *, capacity: int) -> None:
    """Assert that sequences keep their tokens and targets, scales are exact, and nothing overflows."""
    for seen, *_ in ranks:
        for step in seen:
            assert max(step["slots"]) <= capacity
            for ids, tokens, targets in zip(step["ids"], step["tokens"], step["targets"], strict=True):
                for i, row, goals in zip(ids, tokens, targets, strict=True):
                    assert row == wanted[i]["input_ids"]
                    assert goals == [*wanted[i].get("labels", wanted[i]["input_ids"])[1:], -100]
    for number in range(len(ranks[0][0])):
        of_ranks = [seen[number] for seen, *_ in ranks]
        assert len({len(step["ids"]) for step in of_ranks}) == 1
        total = sum(t != -100 for step in of_ranks for batch in step["targets"] for row in batch for t in row)
        scale = len(ranks) * len(of_ranks[0]["ids"]) / total if total else 0.0
        assert all(abs(step["scale"] - scale) <= 1e-12 * scale for step in of_ranks)
