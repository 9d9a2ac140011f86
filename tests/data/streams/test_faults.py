"""Shards that run dry, lie, or cannot be read, ranks and workers that die: a message within a time-out."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from lightning_thd import THDDataModule
from lightning_thd.data.streams import Stream
from lightning_thd.data.streams.ranks import Peers
from tests.data.streams.jobs import check_content, counted, describe, module, read_shards, run, write_shards
from tests.ranks import RankError, run_ranks


def job(folder: str, kwargs: dict[str, Any]) -> Any:
    return run(f"{folder}/*.jsonl", **kwargs)


def caught(folder: str, kwargs: dict[str, Any]) -> str:
    try:
        run(f"{folder}/*.jsonl", **kwargs)
    except (ValueError, RuntimeError) as err:
        return f"{type(err).__name__}: {err}"
    return "nothing"


@pytest.mark.parametrize("sizes", [[100, 2, 2], pytest.param([0, 0, 50], marks=pytest.mark.slow)])
def test_skewed_and_empty_ranks(tmp_path: Path, sizes: list[int]) -> None:
    write_shards(tmp_path, sizes)
    ranks = run_ranks(job, 3, str(tmp_path), {"n": 9, "window": 4}, timeout_s=60)
    wanted = read_shards(tmp_path)
    assert counted(ranks) == dict.fromkeys(wanted, 1)
    check_content(ranks, wanted, capacity=64)


def test_a_bad_record_ends_every_rank_with_its_place_or_is_skipped(tmp_path: Path) -> None:
    write_shards(tmp_path, [20, 20])
    lines = (tmp_path / "001.jsonl").read_text().splitlines()
    lines[3], lines[5], lines[7] = "{", '{"input_ids": [1, -4]}', '{"input_ids": []}'
    (tmp_path / "001.jsonl").write_text("\n".join(lines))
    messages = run_ranks(caught, 2, str(tmp_path), {"n": 6}, timeout_s=60)
    for message in messages:
        assert "Rank 1: shard" in message
        assert "001.jsonl, row 3: not JSON" in message
        assert "on_error='skip'" in message
    loader = module(f"{tmp_path}/*.jsonl", n=6, on_error="skip").train_steps()
    used = [i for step in loader for batch in step.microbatches for i in batch.sequence_ids]
    assert len(used) == len(set(used)) == 37
    assert loader.counts["bad"] == 3
    with pytest.raises(ValueError, match="3 records could not be used, more than max_errors=2.*row 7"):
        run(f"{tmp_path}/*.jsonl", n=6, on_error="skip", max_errors=2)


def dying(part: int, parts: int) -> Iterator[dict[str, Any]]:
    for row in range(100):
        if part == 1 and row == 7:
            os._exit(3)
        yield {"input_ids": np.arange(5)}


def survivor(source: Any = dying, timeout_s: float = 10) -> str:
    """Let rank 1 die while it reads; return what rank 0 is told."""
    started = time.monotonic()
    try:
        run(source, n=8, window=8, timeout_s=timeout_s)
    except RuntimeError as err:
        assert time.monotonic() - started < 30
        if dist.get_rank() == 0:
            raise AssertionError(f"survivor was told: {err}") from err
    return "nothing"


def test_a_rank_that_dies_does_not_leave_the_others_waiting() -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=r"ranks \[1\] died|survivor was told: Rank 0 of 2 .* timeout_s=10"):
        run_ranks(survivor, 2, timeout_s=60)
    assert time.monotonic() - started < 60


def fails_to_begin() -> str:
    """Let the rank that reads fail before its first step; return what a rank is told."""
    loader = module(dying, n=8, window=8).train_steps()
    loader.source._peers = Peers([0], [0, 1], dist.get_rank(), timeout_s=30)
    if dist.get_rank() == 0:
        loader.source._taken = lambda at: (_ for _ in ()).throw(ValueError("cache_dir holds none"))
    with pytest.raises(ValueError, match="cache_dir") as told:
        next(iter(loader))
    return str(told.value)


def test_a_reader_that_cannot_begin_tells_the_ranks_it_reads_for() -> None:
    assert run_ranks(fails_to_begin, 2, timeout_s=60) == ["cache_dir holds none"] * 2


def test_a_worker_that_dies_is_named() -> None:
    def source() -> Iterator[dict[str, Any]]:
        yield {"input_ids": np.arange(5)}
        os.kill(os.getpid(), 9)
        yield {"input_ids": np.arange(5)}

    started = time.monotonic()
    with pytest.raises(ValueError, match="Rank 0: A worker that reads source ended: DataLoader worker"):
        run(source, n=8, num_workers=1, timeout_s=600)
    assert time.monotonic() - started < 60  # it is looked at every few seconds, whatever the time-out


def test_a_worker_that_gives_nothing_is_given_up_after_the_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def source() -> Iterator[dict[str, Any]]:
        for row in range(40):
            time.sleep(0.5 if row == 10 else 60 if row == 30 else 0)  # slow is not silent
            yield {"input_ids": np.arange(5)}

    monkeypatch.setattr("lightning_thd.data.streams.intake._LOOK_S", 0.2)
    loader, given = module(source, n=8, window=8, num_workers=1, timeout_s=3).train_steps(), []
    with pytest.raises(ValueError, match="A worker that reads source ended: it gave nothing for timeout_s=3"):
        given.extend(iter(loader))
    assert len(given) == 2  # the window of the third is not full


@pytest.mark.parametrize(
    ("kwargs", "left", "lost"),
    [
        ({"oversize": "truncate"}, [3, 8, 8], None),
        ({"oversize": "drop"}, [3, 8], None),
        ({"oversize": "own_pack"}, [3, 8, 13], None),
        ({"oversize": "error"}, None, "13 tokens but capacity=8. Set oversize='truncate', 'drop'"),
        ({"oversize": "split"}, None, "oversize='split' needs every length before the first step"),
        (
            {"vocab_size": 12, "oversize": "own_pack"},
            None,
            "the token id 12, but the model's vocabulary",
        ),
    ],
)
def test_long_sequences(kwargs: dict[str, Any], left: list[int] | None, lost: str | None) -> None:
    def source() -> Iterator[dict[str, Any]]:
        for length in (3, 8, 13):
            yield {"input_ids": np.arange(length), "labels": np.arange(length)}

    if lost is not None:
        with pytest.raises(ValueError, match=lost):
            run(source, capacity=8, n=3, **kwargs)
        return
    loader = module(source, capacity=8, n=3, **kwargs).train_steps()
    seen = [describe(step) for step in loader]
    name = {"truncate": "truncated", "drop": "dropped", "own_pack": "own_pack"}[kwargs["oversize"]]
    assert loader.counts[name] == 1
    assert loader.counts["tokens_lost"] == {"truncate": 5, "drop": 13, "own_pack": 0}[kwargs["oversize"]]
    lengths = [len(row) for step in seen for batch in step["tokens"] for row in batch]
    assert sorted(lengths) == left


def test_tails(tmp_path: Path) -> None:
    write_shards(tmp_path, [20])
    for packs, n in ((False, 8), (True, 5)):
        whole = counted([run(f"{tmp_path}/*.jsonl", n=n, packs=packs)])
        assert len(whole) == 20
        loader = module(f"{tmp_path}/*.jsonl", n=n, packs=packs, tail="drop").train_steps()
        used = [i for step in loader for batch in step.microbatches for i in batch.sequence_ids]
        assert len(used) == len(set(used)) == 20 - loader.counts["tail_dropped"] > 0
        assert packs or loader.counts["tail_dropped"] == 4


def test_streams_do_not_evaluate_and_have_no_dynamic_degrees(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="val is a stream .*train may be a stream"):
        THDDataModule(capacity=8, val=lambda: iter([]))
    data = THDDataModule(dying, capacity=8)
    data._attached = replace(data._attached, sharing=Any)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="context_parallel_size='dynamic' plans a degree"):
        data.train_steps()


def test_what_is_no_stream(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a float is no sequence"):
        run(lambda: iter([1.5]))
    with pytest.raises(ValueError, match="A pass over the stream gave no step"):
        run(lambda: iter([]))
    with pytest.raises(ValueError, match="too few sequences for one step of Sequences"):
        run(lambda: iter([{"input_ids": [1, 2]}]), n=9, tail="drop")
    with pytest.raises(ValueError, match="no file matches it"):
        run(f"{tmp_path}/*.jsonl")
    (tmp_path / "a.xyz").write_text("")
    with pytest.raises(ValueError, match="xyz cannot be streamed. Shards are"):
        run(f"{tmp_path}/a.xyz")
    generator = ({"input_ids": [1, 2]} for _ in range(4))
    with pytest.raises(ValueError, match="can be read one time"):
        run(generator, epochs=2, n=2)
    with pytest.raises(ValueError, match="the sequence has no tokens.*empty='drop'"):
        run(lambda: iter([{"input_ids": []}]))
    with pytest.raises(ValueError, match="on_error='ignore'; wanted one of raise, skip"):
        Stream(source="x", on_error="ignore")
