"""Layouts of ranks on imagined GPUs give one process's parameters, and wait for nothing of ours."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.imagined.layouts import IN_FP64, LAYOUTS, dtype_of, train_all
from tests.imagined.support import needs_imagination, our_reads, our_uploads
from tests.ranks import run_ranks
from tests.strategies.jobs import Layout, check_stages, train_by_hand
from tests.strategies.test_expert_layouts import compare
from tests.strategies.test_layouts import check

pytestmark = [pytest.mark.imagined, needs_imagination]


def rows(world: int, size: int) -> list[list[str]]:
    """Return names of layouts that run on one start of ranks, which takes seconds."""
    names = [name for name, (_, layout, _) in LAYOUTS.items() if layout.world == world]
    return [names[i : i + size] for i in range(0, len(names), size)]


def check_traffic(name: str, found: dict[str, Any]) -> None:
    """Compare what a step of one rank read, uploaded and forgot with the table of docs/guides/speed.md."""
    # A stage of a pipeline reads its losses and logged values once.
    assert sum(our_reads(found).values()) <= float(LAYOUTS[name][1].pp > 1), (name, our_reads(found))
    ours = our_uploads(found)
    assert ours, (name, found["uploads"])
    assert all("pinned non_blocking" in row for row in ours), (name, ours)
    assert not found["lost"], (name, found["lost"])


@pytest.mark.parametrize("names", [*rows(2, 6), *rows(4, 4)], ids=", ".join)
def test_layouts_on_an_imagined_nccl(names: list[str]) -> None:
    world = LAYOUTS[names[0]][1].world
    ranks = run_ranks(train_all, world, tuple(names), timeout_s=1_800.0, imagined=True)
    for name, found in zip(names, zip(*ranks, strict=True), strict=True):
        family, layout, step = LAYOUTS[name]
        if layout.pp == 1:
            check(family, layout, step, dtype_of(name), list(found))
        else:
            wanted = train_by_hand(family, layout, step, dtype_of(name))
            check_stages(found, wanted, 1e-10 if name in IN_FP64 else 1e-5)
        for rank in found:
            check_traffic(name, rank)


def test_stages_that_balance_experts_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL makes a communicator when both ranks are there: one received in one group, one sent in another."""
    monkeypatch.setattr("tests.strategies.test_expert_layouts.run_ranks", partial(run_ranks, imagined=True))
    compare("qwen3_moe", [(Layout(pp=2), "sequence")])
