"""Bytes and seconds of every way, and what they make ``auto`` choose."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_thd.attention.context_parallel import choose_way
from lightning_thd.attention.spec import make_spec
from lightning_thd.parallel.context.costs import CommCosts, LayerSizes
from lightning_thd.parallel.context.layout import ShardLayout

GQA = LayerSizes(heads=32, kv_heads=8, head_size=128, value_size=128, element_bytes=2)
FREE_KERNEL = {"flops_per_s": 1e30, "latency_s": 0.0}


def chosen(
    lengths: list[int], layout: str, *, cp: int = 4, heads: int = 32, window: int | None = None, **costs: Any
) -> str:
    at = ShardLayout(lengths, cp=cp, rank=0, layout=layout, costs=CommCosts(**costs))
    sizes = LayerSizes(heads=heads, kv_heads=8, head_size=128, value_size=128, element_bytes=2)
    return choose_way(at, sizes, make_spec(128, window=window))


def test_the_fewest_bytes_win_where_kernels_cost_nothing() -> None:
    assert chosen([512] * 64, "contiguous", **FREE_KERNEL) == "needed"
    assert chosen([32_768], "dual_chunk", **FREE_KERNEL) == "needed"  # 36 of 48 units, ulysses 60
    assert chosen([32_768], "dual_chunk", cp=8, **FREE_KERNEL) == "ulysses"
    assert chosen([32_768], "dual_chunk", cp=8, window=1024, **FREE_KERNEL) == "needed"
    assert chosen([32_768], "dual_chunk", cp=8, heads=36, **FREE_KERNEL) == "needed"  # 36 / 8 heads a rank


def test_an_uneven_kernel_is_paid_for() -> None:
    # One long sequence cut in stretches: the last rank has 7 / 16 of the work, with heads each has a quarter.
    assert chosen([65_536], "contiguous", flops_per_s=1e12) == "ulysses"


def test_bytes() -> None:
    assert GQA.key_bytes == 4096
    assert GQA.gather_bytes(1000, 4) == 3 * 1000 * 4096
    assert GQA.ulysses_bytes(1000, 4) == 3 * 1000 * 40 * 256 * 2 // 4
    assert CommCosts(bandwidth_bytes_per_s=1e9, latency_s=1e-5).seconds(1e6, messages=2) == pytest.approx(
        1.02e-3
    )


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("latency_s", -1.0, ValueError, "latency_s=-1.0; wanted a finite number of 0 or more"),
        ("bandwidth_bytes_per_s", 0, ValueError, "wanted a finite number above 0"),
        ("flops_per_s", float("nan"), ValueError, "wanted a finite number above 0"),
        ("latency_s", "8", TypeError, "latency_s is a str, '8'; wanted a number"),
    ],
)
def test_costs_are_checked(name: str, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CommCosts(**{name: value})
