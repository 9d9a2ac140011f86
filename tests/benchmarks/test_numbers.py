"""The benchmarks' clock, table and simulation count what they say, and every part can be started."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import __main__ as harness
from benchmarks import attention, attention_kernels, dynamic_cp, loss, results
from benchmarks.clock import Load, Times, take_turns
from benchmarks.results import Result
from lightning_thd.packing import Cost
from lightning_thd.packing.sharing import DynamicBins, Sharing


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    rows: list[Result] = []
    monkeypatch.setattr(results, "FOUND", rows)
    return rows


def test_ways_take_turns_and_a_ratio_is_the_median_of_the_rounds_own() -> None:
    calls: list[str] = []
    ways = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    times = take_turns(ways, 3, warm_up=1, most={"b": 2})
    assert calls == ["a", "b", "a", "b", "a", "b", "a"]
    assert [len(times[name].cpu) for name in "ab"] == [3, 2]
    ours = Times([1.0, 5.0, 1.0], [1.0] * 3)  # a burst of other work hit both in the second round
    peer = Times([2.0, 10.0, 2.5], [2.0] * 3)
    assert ours.times(peer) == 2.0
    row = results.pair("a thing", ours, peer, 2.0, precision="fp32")
    assert (row.met, row.cpu_s, row.peer_cpu_s, row.unit) == (True, 1.0, 2.0, "s")
    rate = results.pair("tokens", ours, peer, 3.0, precision="bf16", work=10.0)
    assert (rate.met, rate.ours, rate.peer, rate.unit) == (False, 10.0, 4.0, "tokens/s")


def test_load_counts_the_work_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0])
    seconds = iter([5.0, 9.0])
    stat = "cpu  {} 0 0 12345 678 0 0 0 0 0\n"
    monkeypatch.setattr("benchmarks.clock.time.perf_counter", lambda: next(clock))
    monkeypatch.setattr("benchmarks.clock.cpu_seconds", lambda: next(seconds))
    (tmp_path / "stat").write_text(stat.format(0))
    load = Load(tmp_path / "stat")
    (tmp_path / "stat").write_text(stat.format(1100))
    assert load.others() == pytest.approx((11.0 - 4.0) / 10.0)


def test_results_are_written_on_a_quiet_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = [0.6]

    class Busy:
        def others(self) -> float:
            return busy[0]

    row = Result(what="w", ours=1.0, unit="s", peer=None, ratio=None, goal="<= 2 s", met=True)
    monkeypatch.setattr(harness, "Load", Busy)
    monkeypatch.setattr(harness, "HERE", tmp_path)
    monkeypatch.setattr(harness, "NAMES", ("one", "two"))
    monkeypatch.setattr(harness, "run", lambda name: harness.Run(name, [row], 60.0, busy[0]))
    monkeypatch.setattr(harness.time, "sleep", lambda _: None)
    assert harness.main([]) == 1
    assert not (tmp_path / "RESULTS.md").exists()
    assert harness.main(["--only", "one"]) == 0
    assert "0.6 cores of other work: read ratios and CPU seconds only." in capsys.readouterr().out
    busy[0] = 0.4
    assert harness.main([]) == 0
    assert "2 of 2 goals are met" in (tmp_path / "RESULTS.md").read_text()
    row = Result(what="new", ours=3.0, unit="s", peer=None, ratio=None, goal="<= 2 s", met=False)
    assert harness.main(["--again", "one"]) == 0
    text = (tmp_path / "RESULTS.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith(("| one | ", "| two | "))]
    assert [line.split(" | ")[1] for line in rows[:2]] == ["new", "w"]
    assert "1 of 2 goals are met" in text


def test_every_part_exists_and_takes_its_arguments() -> None:
    assert len(set(harness.NAMES)) == len(harness.NAMES) > 10
    for name in harness.NAMES:
        main = importlib.import_module(f"benchmarks.{name}").main
        inspect.signature(main).bind([])


@pytest.mark.parametrize("way", ["sdpa in a loop", "sdpa, dense mask", "sdpa, padded batch"])
def test_all_ways_of_attention_compute_the_same(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TOKENS", 256)
    monkeypatch.setattr(attention, "HEADS", 2)
    lengths = attention.draw_lengths(8, "random")
    ours, both = (pair() for pair in attention.prepare(lengths, "ours"))
    theirs, their_grads = (pair() for pair in attention.prepare(lengths, way))
    if way == "sdpa, padded batch":

        def unpad(x: torch.Tensor) -> torch.Tensor:
            return torch.cat([row[:, :n].transpose(0, 1) for row, n in zip(x, lengths, strict=True)])

        theirs = unpad(theirs)
        their_grads = [unpad(x) for x in their_grads]
    torch.testing.assert_close([ours, *both], [theirs, *their_grads], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", list(attention_kernels.PATHS))
def test_every_path_of_the_kernel_is_near_fp64(
    found: list[Result], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_kernels, "LENGTHS", (50, 20, 33))
    path = attention_kernels.PATHS[name]
    attention_kernels.measure(name, path, 1)
    assert len(found) == 1 + 4 * path.plain
    assert all(row.met for row in found)
    if path.plain:
        q, k, v, _, sinks = attention_kernels.inputs(path)
        exact, theirs = (
            way(path, q, k, v, sinks) for way in (attention_kernels.exact, attention_kernels.torchs)
        )
        torch.testing.assert_close(exact, theirs)


def test_losses_are_measured_against_all_peers(found: list[Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "WIDTH", 16)
    loss.show_errors(vocabulary=64, tokens=8)
    loss.show_size(64, 32_000, torch.float32, 0, ["naive", "liger's algorithm", *loss.OURS])
    assert {row.precision for row in found} == {"fp32", "bf16"}
    assert len([row for row in found if row.what.endswith("32,000, naive")]) == 3


def test_a_case_of_dynamic_degrees_is_within_its_memory() -> None:
    case = dynamic_cp.Case(shape="chat", ranks=8, capacity=2_048, largest=8, sequences=64)
    for host in ("DDP", "FSDP"):
        case_found = dynamic_cp.run_case(case, "keys", host)
        assert case_found.fullest <= 1.0
        assert 0.9 < case_found.gain <= case_found.most_gain * 1.001
        assert case_found.waits >= case_found.least_waits >= 1.0


def test_a_group_begins_once_its_last_rank_is_ready() -> None:
    sharing = Sharing(max_degree=2, exchange=(0.0,), waits="step")
    plan = DynamicBins(
        order=np.arange(3),
        offsets=np.array([0, 1, 2, 3]),
        degree=np.array([1, 1, 2]),
        first=np.array([0, 1, 0]),
        microbatch=np.array([0, 0, 1]),
        load=np.zeros(3),
        num_microbatches=2,
    )
    lengths = np.array([100, 300, 400])
    cost = Cost(linear=4e14, quadratic=0.0)
    exchange = dynamic_cp.exchange_s(200, 2, "keys")
    taken, busy, fullest = dynamic_cp.dynamic_step(plan, lengths, 2, cost, sharing, "keys")

    assert taken == pytest.approx(300 + 200 + exchange)
    assert busy == pytest.approx(100 + 300 + 400 + 2 * exchange)
    assert fullest == 300
