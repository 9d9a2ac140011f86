"""A stream uses every sequence once, on any number of ranks, and goes on after its last whole step."""

from __future__ import annotations

import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import chaos
from tests.data.streams.jobs import check_content, counted, module, read_shards, run, write_shards
from tests.ranks import run_ranks
from tests.trust.disasters import JOB

SIZES = [40, 3, 25, 0, 17, 9]


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize(("buffer", "workers"), [(0, 0), (40, 0), (0, 2)])
def test_one_rank_goes_on_with_the_same_steps(tmp_path: Path, packs: bool, buffer: int, workers: int) -> None:
    write_shards(tmp_path, SIZES)
    kwargs: dict[str, Any] = {"packs": packs, "n": 2 if packs else 7, "shuffle_buffer": buffer}
    kwargs |= {"seed": -1, "num_workers": workers, "window": 5 if workers else 16}
    whole, *_ = run(f"{tmp_path}/*.jsonl", epochs=2, **kwargs)
    for cut in (1, len(whole) // 2 - 1, len(whole) // 2, len(whole) // 2 + 1):
        first, state = run(f"{tmp_path}/*.jsonl", steps=cut, epochs=2, **kwargs)
        torch.save(state, tmp_path / "state.pt")
        saved = torch.load(tmp_path / "state.pt", weights_only=True)
        rest, *_ = run(f"{tmp_path}/*.jsonl", state=saved, epochs=2 - saved["epoch"], **kwargs)
        assert first + rest == whole


def test_workers_change_nothing_that_counts(tmp_path: Path) -> None:
    write_shards(tmp_path, SIZES)
    used: Counter[int] = Counter()
    state = None
    for workers in (2, 0, 1):
        seen, state = run(
            f"{tmp_path}/*.jsonl", state=state, steps=4 if workers != 1 else None, n=6, num_workers=workers
        )
        check_content([(seen, None)], read_shards(tmp_path), capacity=64)
        used += counted([(seen, None)])
    assert used == dict.fromkeys(read_shards(tmp_path), 1)


@pytest.mark.parametrize("packs", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_other_numbers_of_ranks_use_what_is_left_once(tmp_path: Path, packs: bool) -> None:
    write_shards(tmp_path, [5 * size for size in SIZES] if packs else SIZES, labels=True)
    expected = read_shards(tmp_path)
    used: Counter[int] = Counter()
    state = None
    for ranks, steps in ((3, 2), (2, 2), (4, None)):
        go = partial(run, packs=packs, n=12 if packs else 9, window=5, state=state, steps=steps)
        results = run_ranks(go, ranks, f"{tmp_path}/*.jsonl", timeout_s=120)
        check_content(results, expected, capacity=64)
        used += counted(results)
        state = results[0][1]
        assert all(repr(other) == repr(state) for _, other in results)
    assert used == dict.fromkeys(expected, 1)


def test_states_of_other_data_are_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, SIZES)
    loader = module(f"{tmp_path}/*.jsonl").train_steps()
    with pytest.raises(ValueError, match="so no stream has saved it"):
        loader.load_state_dict({"epoch": 0, "step": 3, "fingerprint": "x"})
    state = loader.state_dict()

    def refused(folder: Path, saved: dict[str, Any]) -> str:
        with pytest.raises(ValueError, match="The checkpoint was written with 6 shards, but") as error:
            module(f"{folder}/*.jsonl").train_steps().load_state_dict(saved)
        return str(error.value)

    moved = tmp_path / "moved"
    shutil.copytree(tmp_path, moved)
    message = refused(moved, state)
    assert "000.jsonl and 5 more are missing, and " in message
    assert f"{moved}/000.jsonl and 5 more are new. Pass the same source, with the files under" in message

    shutil.copy(tmp_path / "000.jsonl", tmp_path / "006.jsonl")
    assert "the stream has 7: " in refused(tmp_path, state)
    assert f"{tmp_path}/006.jsonl is new. Pass" in refused(tmp_path, state)

    (tmp_path / "006.jsonl").unlink()
    (tmp_path / "000.jsonl").unlink()
    assert f"the stream has 5: {tmp_path}/000.jsonl is missing. Pass" in refused(tmp_path, state)
    # A checkpoint of an earlier release names no shards.
    without = {key: value for key, value in state.items() if key != "shard_names"}
    assert "the stream has 5, or others. Pass" in refused(tmp_path, without)

    with pytest.raises(TypeError, match="no length. Pass steps_per_epoch"):
        len(loader)


def test_a_shard_that_lost_rows_is_noticed(tmp_path: Path) -> None:
    write_shards(tmp_path, [30])
    state = run(f"{tmp_path}/*.jsonl", steps=1, n=4)[1]
    first, *_ = (tmp_path / "000.jsonl").read_text().splitlines()
    (tmp_path / "000.jsonl").write_text(first)
    with pytest.raises(ValueError, match="Rank 0: Shard .*000.jsonl had .* unused records when"):
        run(f"{tmp_path}/*.jsonl", state=state, n=4)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, 20])
def test_every_sequence_counts_once_along_the_surviving_line(tmp_path: Path, kills: int) -> None:
    write_shards(tmp_path, [90, 20, 60, 5, 65])
    names = []

    for number in range(kills + 1):
        ranks = (4, 2)[number % 2]
        workers = (0, 2)[number // 2 % 2]
        names.append(f"run{number}")
        job = chaos.start(JOB, tmp_path, ranks, names[-1], str(workers))
        if number < kills:
            chaos.run_until(job, tmp_path, chaos.lines(tmp_path) + 10 * ranks, timeout_s=150)
            chaos.kill(job, tmp_path, names[-1])
        else:
            assert job.wait(300) == 0, (tmp_path / f"{names[-1]}.log").read_text()[-3000:]

    steps = chaos.surviving_line(tmp_path, names)
    used = [i for ids in steps.values() for i in ids]
    assert sorted(used) == sorted(read_shards(tmp_path))
    assert [len(steps[k]) for k in sorted(steps)] == [6] * 40
