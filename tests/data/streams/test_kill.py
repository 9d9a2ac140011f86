"""A training job on a stream, killed again and again on changing numbers of ranks and workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import chaos
from tests.data.streams.jobs import read_shards, write_shards

MODULE = "tests.data.streams.kill_job"


@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, 20])
def test_every_sequence_counts_once_along_the_surviving_line(tmp_path: Path, kills: int) -> None:
    write_shards(tmp_path, [90, 20, 60, 5, 65])
    names = []
    for number in range(kills + 1):
        ranks, workers = (4, 2)[number % 2], (0, 2)[number // 2 % 2]
        names.append(f"run{number}")
        job = chaos.start(MODULE, tmp_path, ranks, names[-1], str(workers))
        if number < kills:
            chaos.run_until(job, tmp_path, chaos.lines(tmp_path) + 10 * ranks, timeout_s=150)
            chaos.kill(job, tmp_path, names[-1])
        else:
            assert job.wait(300) == 0, (tmp_path / f"{names[-1]}.log").read_text()[-3000:]
    steps = chaos.surviving_line(tmp_path, names)
    used = [i for ids in steps.values() for i in ids]
    assert sorted(used) == sorted(read_shards(tmp_path))
    assert [len(steps[k]) for k in sorted(steps)] == [6] * 40
