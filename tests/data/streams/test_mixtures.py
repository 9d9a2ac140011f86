"""Mixtures of streams: shares of every prefix, ends of sources, resuming, logs, and what is refused."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_thd import Sequences, THDDataModule
from lightning_thd.data.streams import Stream
from lightning_thd.packing.mixtures import Mixing, take_turns
from tests.data.streams import jobs
from tests.data.streams.jobs import counted, write_shards
from tests.data.support import CAPACITY
from tests.data.test_mixing import logged_losses, source_losses
from tests.ranks import run_ranks
from tests.tiny import TinyModule, nll, sequences

WEIGHTS = {"code": 0.3, "chat": 0.7}


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_every_prefix_has_the_shares_within_one_turn(shares: list[int]) -> None:
    order, blocked = take_turns(dict(enumerate(shares)), [0] * len(shares), [300] * len(shares), 150)
    assert blocked is None
    used = [0] * len(shares)
    for number, chosen in enumerate(order, 1):
        used[chosen] += 1
        for count, share in zip(used, shares, strict=True):
            assert abs(count - Fraction(share * number, sum(shares))) < 1


def write(folder: Path, sizes: dict[str, list[int]]) -> None:
    for name, shards in sizes.items():
        (folder / name).mkdir()
        write_shards(folder / name, shards, seed=len(name))


def mixed(folder: str, weights: dict[str, float]) -> dict[str, Any]:
    return {name: (f"{folder}/{name}/*.jsonl", weight) for name, weight in weights.items()}


def run(folder: str, weights: dict[str, float], *, dry: Any = None, **kwargs: Any) -> Any:
    return jobs.run(mixed(folder, weights), n=10, mixing=Mixing(dry=dry), **kwargs)


def ids_of(ranks: list[Any]) -> list[list[int]]:
    """List the sequences of every step over all ranks."""
    return [
        sorted(i for seen, *_ in ranks for batch in seen[k]["ids"] for i in batch)
        for k in range(len(ranks[0][0]))
    ]


def check_shares(
    steps: list[list[int]], first_shard: int, share: float, *, total: int = 0, of: int = 0
) -> None:
    """Assert after every step that the first source (shards below ``first_shard``) has its share."""
    for ids in steps:
        total = total + len(ids)
        of = of + sum(i >> 40 < first_shard for i in ids)
        assert abs(of - share * total) < 1


@pytest.mark.parametrize("shuffle_buffer", [0, 12])
def test_every_step_keeps_the_shares_and_a_dry_source_begins_again(
    tmp_path: Path, shuffle_buffer: int
) -> None:
    write(tmp_path, {"code": [9, 0, 4], "chat": [40, 31]})
    run1 = run(str(tmp_path), WEIGHTS, shuffle_buffer=shuffle_buffer)
    steps = ids_of([run1])
    check_shares(steps, 3, 0.3)
    used = counted([run1])
    # The epoch ends with the step by which both were used whole: 71 of chat, 30 of the 13 of code.
    assert {used[i] for i in used if i >> 40 >= 3} <= {1, 2}
    assert sum(count for i, count in used.items() if i >> 40 >= 3) >= 71
    assert len([i for i in used if i >> 40 >= 3]) == 71
    assert {used[i] for i in used if i >> 40 < 3} <= {2, 3}
    assert len(steps) == 11


def test_an_epoch_that_stops_with_the_first_dry_source(tmp_path: Path) -> None:
    write(tmp_path, {"code": [12], "chat": [100]})
    first = run(str(tmp_path), WEIGHTS, dry="stop")
    steps = ids_of([first])
    check_shares(steps, 1, 0.3)
    used = counted([first])
    assert set(used.values()) == {1}
    assert sum(i >> 40 == 0 for i in used) == 12
    both = run(str(tmp_path), WEIGHTS, dry="stop", epochs=2)
    used = counted([both])
    assert {used[i] for i in used if not i >> 40} == {2}
    assert {used[i] for i in used if i >> 40} == {1}  # chat went on where it stood


def test_the_rest_goes_to_the_others(tmp_path: Path) -> None:
    write(tmp_path, {"code": [12], "chat": [40], "talk": [30]})
    weights = {"code": 0.5, "chat": 0.25, "talk": 0.25}
    one = run(str(tmp_path), weights, dry="rest", epochs=2)
    used = counted([one])
    assert set(used.values()) == {2}
    assert len(used) == 82
    steps = ids_of([one])[:9]
    of = Counter(i >> 40 for i in itertools.chain(*steps[2:7]))
    assert abs(of[1] - of[2]) <= 2  # equal shares, once code is dry after 24
    check_shares(steps[:2], 1, 0.5)


@pytest.mark.parametrize(
    "dry", ["restart", *(pytest.param(dry, marks=pytest.mark.slow) for dry in ("stop", "rest"))]
)
def test_shares_hold_on_other_numbers_of_ranks(tmp_path: Path, dry: str) -> None:
    write(tmp_path, {"code": [30, 3, 12], "chat": [60, 5, 31, 9]})
    state = None
    total = 0
    of = 0
    used: Counter[int] = Counter()

    for ranks, steps in ((1, 3), (3, 2), (2, 4), (1, 3)):
        kwargs: Any = {"state": state, "steps": steps, "window": 6, "dry": dry}
        of_ranks = run_ranks(partial(run, **kwargs), ranks, str(tmp_path), WEIGHTS, timeout_s=100)
        now = ids_of(of_ranks)
        if dry == "restart" or total < 80:
            check_shares(now, 3, 0.3, total=total, of=of)
        total = total + sum(map(len, now))
        of = of + sum(i >> 40 < 3 for ids in now for i in ids)
        used += counted(of_ranks)
        state = of_ranks[0][1]
        assert all(repr(other) == repr(state) for _, other in of_ranks)

    assert total == 120
    assert set(used.values()) == {1}


def test_the_same_ranks_go_on_with_the_same_steps(tmp_path: Path) -> None:
    write(tmp_path, {"code": [20], "chat": [5, 9, 30]})
    go = partial(run, dry="rest", window=3)
    arguments = (3, str(tmp_path), WEIGHTS)
    whole = run_ranks(go, *arguments)
    first = run_ranks(partial(go, steps=2), *arguments)
    rest = run_ranks(partial(go, state=first[0][1]), *arguments)
    assert [seen for seen, _ in rest] == [seen[2:] for seen, _ in whole]


def stream_of_losses(folder: Path) -> THDDataModule:
    streams = {
        name: (Stream(f"{folder}/{name}.jsonl", window=6), weight)
        for name, weight in (("a", 0.3), ("b", 0.7))
    }
    return THDDataModule(streams, capacity=CAPACITY, global_batch=Sequences(5), mixing=Mixing(dry="rest"))


def test_the_loss_of_each_stream_is_that_of_its_sequences_alone(tmp_path: Path) -> None:
    rows = {"a": sequences(8), "b": sequences(14, labels=True, seed=1)}
    for name, samples in rows.items():
        lines = [json.dumps({key: list(map(int, row)) for key, row in one.items()}) for one in samples]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))

    logged = logged_losses(source_losses(tmp_path / "logs", data=stream_of_losses(tmp_path)))
    torch.manual_seed(0)
    model = TinyModule(lr=0.0).model
    alone = {name: [nll(model, row) for row in samples] for name, samples in rows.items()}

    for name, samples in rows.items():
        assert logged[f"data/{name}/tokens"][-1] == 2 * sum(len(row["input_ids"]) for row in samples)
        losses = logged[f"data/{name}/loss"]
        whole = sum(float(loss.detach()) for loss, _ in alone[name]) / sum(count for _, count in alone[name])
        assert len(losses) >= 3
        assert min(losses) - 1e-6 <= whole <= max(losses) + 1e-6

    steps = [step for _ in range(2) for step in stream_of_losses(tmp_path).train_steps()]
    used = [[i for batch in step.microbatches for i in batch.sequence_ids] for step in steps]

    for k, name in enumerate(rows):
        expected = []
        for start in range(0, len(used), 3):
            mine = [
                alone[name][i & (1 << 40) - 1] for ids in used[start : start + 3] for i in ids if i >> 40 == k
            ]
            count = sum(count for _, count in mine)
            expected += [sum(float(loss.detach()) for loss, _ in mine) / count] if count else []
        assert logged[f"data/{name}/loss"] == pytest.approx(expected, rel=1e-6)


def test_what_a_mixture_of_streams_refuses(tmp_path: Path) -> None:
    write(tmp_path, {"code": [5], "chat": [5]})
    stream = Stream(f"{tmp_path}/code/*.jsonl")
    file = f"{tmp_path}/code/000.jsonl"
    longer = [(Stream("x", steps_per_epoch=steps), 1) for steps in (3, 4)]
    refused: list[tuple[Any, Mixing | None, str]] = [
        (
            {"code": (stream, 1), "chat": stream},
            None,
            r"train\['chat'\] is a Stream, wanted \(source, weight",
        ),
        ({"code": (stream, 1), "chat": (stream, 0)}, None, "The weight of 'chat' is 0.0"),
        ({"code": (stream, 1)}, Mixing(epoch="shortest"), "need sources whose sizes are known"),
        (dict(zip("ab", longer, strict=True)), None, "ask for epochs of .'3', '4'. steps"),
        ({"code": (stream, 1), "gone": (Stream("nowhere/*.jsonl"), 1)}, None, "The source 'gone' .* no file"),
        ({"code": (stream, 1), "none": (lambda: iter([]), 1)}, None, "'none' gave no sequence in a whole"),
        ({"code": (stream, 1), "list": ([{"input_ids": [1]}], 1)}, None, "dict is not a stream"),
        (
            {"code": (file, 1)},
            Mixing(dry="stop"),
            r"Mixing\(dry='stop'\) is for streams; no source here is one",
        ),
    ]

    def begin(train: Any, mixing: Mixing | None) -> None:
        data = THDDataModule(train, capacity=64, global_batch=Sequences(4), mixing=mixing)
        data.setup("fit")
        next(iter(data.train_steps()))

    for train, mixing, message in refused:
        with pytest.raises((ValueError, TypeError), match=message):
            begin(train, mixing)
    _, state = run(str(tmp_path), WEIGHTS, steps=1)
    with pytest.raises(ValueError, match="or other shares of its sources"):
        run(str(tmp_path), {"code": 0.4, "chat": 0.6}, state=state)
