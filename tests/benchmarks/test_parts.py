"""Parts of the benchmarks at a tiny size: they run to their end and record what they promise."""

from __future__ import annotations

import pytest
import torch

from benchmarks import (
    attention_kernels,
    balance,
    end_to_end,
    import_time,
    loss,
    loss_curves,
    profile_step,
    results,
    throughput_overhead,
)
from benchmarks.results import HOST, Result
from lightning_thd.packing import Cost
from tests.tiny import sequences


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    rows: list[Result] = []
    monkeypatch.setattr(results, "FOUND", rows)
    return rows


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_to_end, "CAPACITY", 512)
    monkeypatch.setattr(end_to_end, "StdlibText", lambda max_bytes: sequences(60, longest=200))
    monkeypatch.setattr(loss_curves, "CAPACITY", 256)
    monkeypatch.setattr(loss_curves, "MEAN", 2)
    monkeypatch.setattr(attention_kernels, "LENGTHS", (50, 20, 33))


@pytest.mark.slow
def test_end_to_end_names_precisions_and_ways(small: None, found: list[Result]) -> None:
    ways = ["ours, fp32", "padded, fp32", "flattened, fp32", "ours, bf16", "flattened, bf16"]
    end_to_end.main(["--documents", "4", "--rounds", "1", "--ways", *ways])
    assert [row.what for row in found] == [
        "training, ours, fp32 / flattened, fp32",
        "training, ours, bf16 / flattened, bf16",
    ]
    assert [row.precision for row in found] == ["fp32", "bf16"]
    assert all(row.cpu_s and row.peer_cpu_s and row.unit == "tokens/s" for row in found)


def test_every_goal_of_training_is_between_ways_that_exist() -> None:
    assert {name for mine, peer, _ in end_to_end.GOALS for name in (mine, peer)} <= set(end_to_end.WAYS)
    assert len(end_to_end.WAYS) == 8


@pytest.mark.parametrize("name", list(attention_kernels.PATHS))
def test_every_path_of_the_kernel_is_near_fp64(small: None, found: list[Result], name: str) -> None:
    path = attention_kernels.PATHS[name]
    attention_kernels.measure(name, path, 1)
    assert len(found) == 1 + 4 * path.plain
    assert all(row.met for row in found)


def test_the_reference_is_torchs_own(small: None) -> None:
    for path in attention_kernels.PATHS.values():
        if path.plain:
            q, k, v, _, sinks = attention_kernels.inputs(path)
            torch.testing.assert_close(
                attention_kernels.exact(path, q, k, v, sinks), attention_kernels.torchs(path, q, k, v, sinks)
            )


@pytest.mark.slow
def test_curves_in_both_precisions_stay_together(small: None, found: list[Result]) -> None:
    loss_curves.main(["--steps", "4"])
    assert [(row.precision, row.goal) for row in found] == [("bf16", "<= 1 %")]
    assert found[0].ours < 1


@pytest.mark.slow
def test_the_profile_names_its_parts(
    small: None, found: list[Result], capsys: pytest.CaptureFixture[str]
) -> None:
    profile_step.main(["--repeat", "1"])
    shown = capsys.readouterr().out
    for part in (*profile_step.PARTS, "everything else", "floor"):
        assert shown.count(f"  {part} ") == 2
    assert [row.precision for row in found] == ["fp32", "bf16"]


def test_a_plan_that_was_made_ahead_is_not_waited_for() -> None:
    column = ("chat", 4, 4096)
    assert balance.waits_ms(column, Cost()) < 50  # planning is done long before the step is


def test_goals_that_were_there_are(found: list[Result]) -> None:
    assert set(throughput_overhead.GOAL_US.values()) == {15.0, 20.0}
    assert import_time.START_S == 5.0
    assert loss.NAIVE_GOAL == {"scalar loss": 1.0, "log-probs alone": 1.0, "log-probs + entropy": 1.15}
    row = balance.judge({"allowed": 1.01, "over": 0.0, "ms": 7.0, "batches": 3}, "a column", 0.1)
    assert "a step waits 0.10 ms: met" in row
    assert {one.precision for one in found} == {HOST}
    assert found[1].what == "a column, plan of 7.0 CPU ms: a step waits"


def test_losses_name_their_precision(found: list[Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "WIDTH", 16)
    loss.show_errors(vocabulary=64, tokens=8)
    loss.show_size(64, 32_000, torch.float32, 0, ["naive", "liger's algorithm", *loss.OURS])
    assert {row.precision for row in found} == {"fp32", "bf16"}
    naive = [row for row in found if row.what.endswith("32,000, naive")]
    assert len(naive) == 3
