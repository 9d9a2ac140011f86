from __future__ import annotations

import itertools

import pytest
import torch

from lightning_thd.flops import measure_flops
from lightning_thd.flops.peaks import synchronize


def test_is_the_best_of_three_shapes_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = ((2, 3, 4), (8, 8, 8), (4, 4, 4))
    monkeypatch.setattr("lightning_thd.flops.peaks._CPU_SHAPES", shapes)
    ticks = itertools.count()
    rate = measure_flops("cpu", dtype=torch.float32, seconds=2, clock=lambda: float(next(ticks)))
    assert rate == 2 * 8 * 8 * 8


def test_what_delays_some_runs_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_thd.flops.peaks._CPU_SHAPES", ((8, 8, 8),))
    seconds = itertools.accumulate([0.0, 10.0, 2.0, 5.0, 9.0])
    rate = measure_flops("cpu", dtype=torch.float32, seconds=20, clock=lambda: next(seconds))
    assert rate == 2 * 8 * 8 * 8 / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measures_a_cpu(dtype: torch.dtype) -> None:
    assert 1e8 < measure_flops("cpu", dtype=dtype, seconds=0.01) < 1e15


def test_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="seconds=0; wanted a finite number above 0"):
        measure_flops("cpu", dtype=torch.float32, seconds=0)


def test_a_cpu_needs_no_waiting() -> None:
    synchronize(torch.device("cpu"))
