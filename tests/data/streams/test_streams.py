"""Streams through the front door: every sequence once, whole, in balanced steps, on every number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.streams.jobs import check_content, counted, read_shards, run, write_shards
from tests.ranks import run_ranks

SIZES = [40, 3, 25, 0, 17]


def job(folder: str, kwargs: dict) -> object:
    return run(f"{folder}/*.jsonl", **kwargs)


@pytest.mark.parametrize("packs", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_ranks_use_every_sequence_once_and_run_as_many_microbatches(tmp_path: Path, packs: bool) -> None:
    write_shards(tmp_path, SIZES, labels=True)
    wanted = read_shards(tmp_path)
    ranks = run_ranks(job, 3, str(tmp_path), {"packs": packs, "n": 6 if packs else 12}, timeout_s=60)
    assert counted(ranks) == dict.fromkeys(wanted, 1)
    check_content(ranks, wanted, capacity=64)
    states = [repr(state) for _, state in ranks]
    assert states[0] == states[1] == states[2]
