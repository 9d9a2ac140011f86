"""Bad records of a stream and a resume: the steps stay the same, and each bad record counts once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.streams.jobs import module, read_shards, run


def write_faulty(folder: Path, *, every: int, fault: dict[str, Any], shards: int = 3, rows: int = 24) -> None:
    """Write labelled records, of which one in ``every`` has ``fault`` in place of its own values."""
    for shard in range(shards):
        lines = []
        for row in range(rows):
            ids = [(shard * 31 + row * 7 + i) % 64 for i in range(2 + (row + shard) % 9)]
            record: dict[str, Any] = {"input_ids": ids, "labels": ids}
            if row and (row + shard) % every == 0:
                record = {"input_ids": ids, **fault}
            lines.append(json.dumps(record))
        (folder / f"{shard}.jsonl").write_text("\n".join(lines))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param({}, id="no labels among labelled records"),
        pytest.param({"labels": [1]}, id="labels of another length"),
    ],
)
def test_a_resume_after_any_step_gives_the_steps_of_an_uninterrupted_run(
    tmp_path: Path, workers: int, fault: dict[str, Any]
) -> None:
    write_faulty(tmp_path, every=3, fault=fault)
    options: dict[str, Any] = {"n": 5, "window": 5, "on_error": "skip", "num_workers": workers}
    whole, _ = run(f"{tmp_path}/*.jsonl", **options)
    assert len(whole) > 5, "too few steps to cut between them"
    for cut in range(1, len(whole)):
        first, state = run(f"{tmp_path}/*.jsonl", steps=cut, **options)
        rest, _ = run(f"{tmp_path}/*.jsonl", state=state, **options)
        assert first + rest == whole, f"resumed after step {cut} of {len(whole)}"


@pytest.mark.parametrize("fault", [{}, {"labels": [1]}])
def test_bad_records_count_once_before_and_after_a_resume(tmp_path: Path, fault: dict[str, Any]) -> None:
    write_faulty(tmp_path, every=4, fault=fault)
    bad = sum(record.get("labels") != record["input_ids"] for record in read_shards(tmp_path).values())
    options: dict[str, Any] = {"n": 5, "window": 5, "on_error": "skip"}
    for cut in (1, 4, 8):
        state = run(f"{tmp_path}/*.jsonl", steps=cut, **options)[1]
        loader = module(f"{tmp_path}/*.jsonl", **options).train_steps()
        loader.load_state_dict(state)
        steps = list(loader)
        assert steps, f"nothing is left after step {cut}"
        assert loader.counts["bad"] == bad, f"resumed after step {cut}"


def test_max_errors_goes_on_counting_after_a_resume(tmp_path: Path) -> None:
    write_faulty(tmp_path, every=4, fault={"labels": [1]})
    bad = sum(record["labels"] != record["input_ids"] for record in read_shards(tmp_path).values())
    options: dict[str, Any] = {"n": 5, "window": 5, "on_error": "skip"}
    _, state = run(f"{tmp_path}/*.jsonl", steps=5, max_errors=bad - 1, **options)
    with pytest.raises(ValueError, match=f"{bad} records could not be used, more than max_errors={bad - 1}"):
        run(f"{tmp_path}/*.jsonl", state=state, max_errors=bad - 1, **options)
    run(f"{tmp_path}/*.jsonl", state=state, max_errors=bad, **options)


def test_counts_of_policies_go_on_after_a_resume(tmp_path: Path) -> None:
    write_faulty(tmp_path, every=100, fault={})
    options: dict[str, Any] = {"n": 5, "window": 5, "capacity": 8, "oversize": "truncate"}
    whole = module(f"{tmp_path}/*.jsonl", **options).train_steps()
    assert list(whole)
    assert whole.counts["truncated"] > 5
    for cut in (1, 6):
        state = run(f"{tmp_path}/*.jsonl", steps=cut, **options)[1]
        resumed = module(f"{tmp_path}/*.jsonl", **options).train_steps()
        resumed.load_state_dict(state)
        assert list(resumed)
        assert resumed.counts == whole.counts, f"resumed after step {cut}"
