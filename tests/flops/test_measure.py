from __future__ import annotations

import itertools

import pytest
import torch

from lightning_thd.flops import measure_flops
from lightning_thd.flops.measure import synchronize


def test_is_the_best_of_three_shapes_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = ((2, 3, 4), (8, 8, 8), (4, 4, 4))
    monkeypatch.setattr("lightning_thd.flops.measure._CPU_SHAPES", shapes)
    ticks = itertools.count()
    # every shape: start, one look, one run, a look after 2 ticks that ends it
    rate = measure_flops("cpu", dtype=torch.float32, seconds=2, clock=lambda: float(next(ticks)))
    assert rate == 2 * 8 * 8 * 8 * 1 / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measures_a_cpu(dtype: torch.dtype) -> None:
    assert 1e8 < measure_flops("cpu", dtype=dtype, seconds=0.01) < 1e15


def test_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="seconds=0 leaves no time to measure in"):
        measure_flops("cpu", dtype=torch.float32, seconds=0)


def test_a_cpu_needs_no_waiting() -> None:
    synchronize(torch.device("cpu"))
