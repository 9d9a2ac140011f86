"""The way of communicating that ``auto`` chooses."""

from __future__ import annotations

import pytest

from lightning_thd.attention.context_parallel import choose_way
from lightning_thd.attention.spec import make_spec
from lightning_thd.parallel.context import costs
from lightning_thd.parallel.context.costs import LayerSizes
from lightning_thd.parallel.context.layout import ShardLayout


def chosen(
    lengths: list[int], layout: str, *, cp: int = 4, heads: int = 32, window: int | None = None
) -> str:
    at = ShardLayout(lengths, cp=cp, rank=0, layout=layout)
    sizes = LayerSizes(heads=heads, kv_heads=8, head_size=128, value_size=128, element_bytes=2)
    return choose_way(at, sizes, make_spec(128, window=window))


def test_the_fewest_bytes_win_where_kernels_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "FLOPS_PER_S", 1e30)
    monkeypatch.setattr(costs, "LATENCY_S", 0.0)
    assert chosen([512] * 64, "contiguous") == "needed"
    assert chosen([32_768], "dual_chunk") == "needed"  # 36 of 48 units, ulysses 60
    assert chosen([32_768], "dual_chunk", cp=8) == "ulysses"
    assert chosen([32_768], "dual_chunk", cp=8, window=1024) == "needed"
    assert chosen([32_768], "dual_chunk", cp=8, heads=36) == "needed"  # 36 / 8 heads a rank


def test_an_uneven_kernel_is_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # One long sequence cut in stretches: the last rank has 7 / 16 of the work, with heads each has a quarter.
    monkeypatch.setattr(costs, "FLOPS_PER_S", 1e12)
    assert chosen([65_536], "contiguous") == "ulysses"
