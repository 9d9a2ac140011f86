"""The benchmarks' own clock, table and refusals; every part exists and can be started by name."""

from __future__ import annotations

import importlib
import inspect
import math
import time
from pathlib import Path

import pytest

from benchmarks import __main__ as harness
from benchmarks import results
from benchmarks.clock import Load, Times, take_turns
from benchmarks.results import Result


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    rows: list[Result] = []
    monkeypatch.setattr(results, "FOUND", rows)
    return rows


def test_ways_take_turns_and_slow_ones_may_run_less_often() -> None:
    calls: list[str] = []
    ways = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    times = take_turns(ways, 3, warm_up=1, most={"b": 2})
    assert calls == ["a", "b", "a", "b", "a", "b", "a"]
    assert [len(times[name].wall) for name in "ab"] == [3, 2]
    assert [len(times[name].cpu) for name in "ab"] == [3, 2]


def test_cpu_seconds_are_not_those_of_the_wall() -> None:
    slept = take_turns({"sleep": lambda: time.sleep(0.1)}, 1, warm_up=0)["sleep"]
    assert slept.wall_s >= 0.1
    assert slept.cpu_s < 0.09


def test_a_ratio_is_the_median_of_the_rounds_own() -> None:
    ours = Times([1.0, 5.0, 1.0], [1.0] * 3)  # a burst of other work hit both in the second round
    peer = Times([2.0, 10.0, 2.5], [2.0] * 3)
    assert ours.times(peer) == 2.0
    assert ours.spread == pytest.approx((3.0 - 1.0) / 2 / 1.0)
    row = results.pair("a thing", ours, peer, 2.0, precision="fp32")
    assert (row.met, row.cpu_s, row.peer_cpu_s, row.unit) == (True, 1.0, 2.0, "s")
    rate = results.pair("tokens", ours, peer, 3.0, precision="bf16", work=10.0)
    assert (rate.met, rate.ours, rate.peer, rate.unit) == (False, 10.0, 4.0, "tokens/s")
    (_, _, line, other) = results.table([("x", row), ("x", rate)])
    assert line == "| x | a thing | fp32 | 1 s | 2.5 s | 2x | 1 / 2 | 100% | >= 2x | yes |"
    assert other.endswith("| NO |")


class Stat:
    """A /proc/stat in which cores worked so many seconds."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.set(0.0)

    def set(self, busy_s: float) -> None:
        self.file.write_text(f"cpu  {round(100 * busy_s)} 0 0 12345 678 0 0 0 0 0\ncpu0 1 2 3\n")


def test_load_counts_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0])
    own = iter([5.0, 9.0])
    monkeypatch.setattr("benchmarks.clock.time.perf_counter", lambda: next(clock))
    monkeypatch.setattr("benchmarks.clock.cpu_seconds", lambda: next(own))
    stat = Stat(tmp_path / "stat")
    load = Load(stat.file)
    stat.set(11.0)
    assert load.others() == pytest.approx((11.0 - 4.0) / 10.0)


def test_without_proc_nothing_is_known(tmp_path: Path) -> None:
    assert math.isnan(Load(tmp_path / "missing").others())


class Busy:
    others_busy = 0.0

    def others(self) -> float:
        return self.others_busy


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Busy]:
    monkeypatch.setattr(harness, "Load", Busy)
    monkeypatch.setattr(harness, "HERE", tmp_path)
    monkeypatch.setattr(harness, "NAMES", ("one", "two"))
    row = Result(what="w", ours=1.0, unit="s", peer=None, ratio=None, goal="<= 2 s", met=True)
    monkeypatch.setattr(harness, "run", lambda name: harness.Run(name, [row], 60.0, Busy.others_busy))
    monkeypatch.setattr(harness.time, "sleep", lambda _: None)
    monkeypatch.setattr(Busy, "others_busy", 0.0)
    return Busy


def test_a_quiet_machine_writes_the_file(machine: type[Busy], tmp_path: Path) -> None:
    machine.others_busy = 0.4
    assert harness.main([]) == 0
    text = (tmp_path / "RESULTS.md").read_text()
    assert "Others kept 0.40 cores busy" in text
    assert "in 2 minutes" in text
    assert "2 of 2 goals are met" in text
    assert "--loaded" not in text


def test_a_busy_machine_is_refused(
    machine: type[Busy], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.others_busy = 0.6
    assert harness.main([]) == 1
    assert not (tmp_path / "RESULTS.md").exists()
    assert "Others keep 0.60 cores busy; RESULTS.md is written below 0.5." in capsys.readouterr().err


def test_a_machine_that_becomes_busy_keeps_the_old_file(
    machine: type[Busy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "too_busy", lambda: "")
    machine.others_busy = 0.9
    (tmp_path / "RESULTS.md").write_text("old")
    assert harness.main([]) == 1
    assert (tmp_path / "RESULTS.md").read_text() == "old"


def test_the_override_is_written_into_the_file(machine: type[Busy], tmp_path: Path) -> None:
    machine.others_busy = 1.7
    assert harness.main(["--loaded"]) == 0
    text = (tmp_path / "RESULTS.md").read_text()
    assert "Written by `python -m benchmarks --loaded`" in text
    assert "Run with `--loaded`" in text
    assert "Others kept 1.70 cores busy" in text


def test_some_alone_write_nothing(machine: type[Busy], tmp_path: Path) -> None:
    assert harness.main(["--only", "two"]) == 0
    assert not (tmp_path / "RESULTS.md").exists()


def test_some_again_keep_the_other_rows(
    machine: type[Busy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert harness.main([]) == 0
    row = Result(what="new", ours=3.0, unit="s", peer=None, ratio=None, goal="<= 2 s", met=False)
    later = harness.Run("one", [row], 30.0, 0.0, when="2026-01-02 03:04")
    monkeypatch.setattr(harness, "run", lambda name: later)
    assert harness.main(["--again", "one"]) == 0
    text = (tmp_path / "RESULTS.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith(("| one | ", "| two | "))]
    assert [line.split(" | ")[1] for line in rows[:2]] == ["new", "w"]
    assert "| one | 30 | 0.00 | 2026-01-02 03:04 |" in text
    assert "1 of 2 goals are met" in text


def test_a_part_that_fails_is_named() -> None:
    text = harness.report([harness.Run("gone", [], 1.0, 0.0, failed=True)], loaded=False)
    assert "`benchmarks.gone` ended with an error and is missing." in text


def test_every_part_exists_and_takes_its_arguments() -> None:
    named = {
        "reading", "streams", "loss", "fp8", "dynamic_cp", "context_balance", "pipeline", "end_to_end",
        "attention", "attention_kernels", "loss_curves", "profile_step",
    }  # fmt: skip
    assert named <= set(harness.NAMES)
    assert len(set(harness.NAMES)) == len(harness.NAMES)
    for name in harness.NAMES:
        main = importlib.import_module(f"benchmarks.{name}").main
        inspect.signature(main).bind([])
