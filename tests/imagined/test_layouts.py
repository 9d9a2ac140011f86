"""Layouts of ranks on imagined GPUs give one process's parameters, and wait for nothing of ours.

What NCCL refuses (CPU tensors, wrong sizes, two ranks on one device) ends the rank.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_thd import Sequences
from tests.imagined import gpu, nccl
from tests.imagined.run import traffic
from tests.imagined.support import needs_imagination, our_reads, our_uploads, reads_of_experts
from tests.ranks import run_ranks
from tests.strategies import jobs
from tests.strategies.jobs import Layout
from tests.strategies.layouts import LAYOUTS, check_layout, dtype_of, rows
from tests.strategies.test_expert_layouts import compare

pytestmark = [pytest.mark.imagined, needs_imagination]

# Layouts with experts under tensor parallelism: the layers of a call of ``training_step``.
LAYERS_OF_A_STAGE = {"dp x tp": 2, "cp x tp": 2, "pp x sp interleaved": 1}
EXPERTS_OF_A_RANK = 2  # of four


def train(name: str) -> dict[str, Any]:
    """Train one layout on this rank; return what it trained, its traffic and messages never waited for."""
    gpu.LOG.clear()
    nccl.CALLS.clear()
    gpu.LOG.step = 0
    results = jobs.train(*LAYOUTS[name], dtype_of(name))
    lost = sorted({call[1] for call in nccl.CALLS if call[0] == "never waited"})
    return {**results, **traffic(gpu.LOG), "lost": lost}


def train_all(names: tuple[str, ...]) -> list[dict[str, Any]]:
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    assert dist.get_backend() == "nccl"
    return [train(name) for name in names]


def check_traffic(name: str, found: dict[str, Any]) -> None:
    """Compare what a step of one rank read, uploaded and forgot with the table of docs/guides/speed.md."""
    # A stage of a pipeline reads its losses and logged values once.
    assert sum(our_reads(found).values()) <= float(LAYOUTS[name][1].pp > 1), (name, our_reads(found))
    check_experts(name, found)
    ours = our_uploads(found)
    assert ours, (name, found["uploads"])
    assert all("pinned non_blocking" in row for row in ours), (name, ours)
    assert not found["lost"], (name, found["lost"])


def check_experts(name: str, found: dict[str, Any]) -> None:
    """Count the reads of transformers' loop over a rank's experts, which these jobs choose by ``"eager"``."""
    reads = reads_of_experts(found)
    if name not in LAYERS_OF_A_STAGE:
        assert not reads, (name, reads)
        return

    # A call asks once which experts tokens chose. For each expert it asks for the tokens, and reads its
    # number four times: to compare it with that of other ranks' experts, to ask for tokens, and to take two
    # weights. The number of other ranks' experts is read once.
    calls = LAYERS_OF_A_STAGE[name] * found["microbatches"] / found["steps"]
    asked = sum(number for row, number in reads.items() if row.startswith("nonzero "))
    numbers = sum(number for row, number in reads.items() if row.startswith("item "))
    experts = asked - calls
    assert asked + numbers == sum(reads.values()), (name, reads)
    assert 0 < experts <= calls * EXPERTS_OF_A_RANK, (name, reads)
    assert 4 * experts <= numbers <= 4 * experts + calls, (name, reads)


@pytest.mark.parametrize("names", [*rows(2, 6), *rows(4, 4)], ids=", ".join)
def test_layouts_on_an_imagined_nccl(names: list[str]) -> None:
    world = LAYOUTS[names[0]][1].world
    ranks = run_ranks(train_all, world, tuple(names), timeout_s=1_800.0, kind="imagined")
    for name, results in zip(names, zip(*ranks, strict=True), strict=True):
        check_layout(name, list(results), dtype_of(name))
        for rank in results:
            check_traffic(name, rank)


def test_stages_that_balance_experts_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL makes a communicator when both ranks are there: one received in one group, one sent in another."""
    monkeypatch.setattr("tests.strategies.test_expert_layouts.run_ranks", partial(run_ranks, kind="imagined"))
    compare("qwen3_moe", [(Layout(pp=2), "sequence")])


EXPERTS = Layout(dp=2, options={"expert_parallel_size": 2})
LAYERS = 2  # of a step
MICROBATCHES = 2


class Grouped(jobs.Job):
    """A job whose experts are multiplied at once, so that their reads do not depend on the tokens."""

    def __init__(self, family: str, dtype: torch.dtype) -> None:
        super().__init__(family, dtype)
        self.model.set_experts_implementation("grouped_mm")


def traffic_of_experts() -> list[dict[str, Any]]:
    """Return what a step reads and uploads with experts on ranks, and with all experts on every rank."""
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    results = []
    for layout in (EXPERTS, Layout(dp=2)):
        gpu.LOG.clear()
        nccl.CALLS.clear()
        gpu.LOG.step = 0
        trained = jobs.train("qwen3_moe", layout, Sequences(12), torch.bfloat16, kind=Grouped)
        assert trained["microbatches"] == trained["steps"] * MICROBATCHES
        lost = [call[1] for call in nccl.CALLS if call[0] == "never waited"]
        results.append({**traffic(gpu.LOG), "lost": lost})
    return results


def test_experts_on_ranks_read_once_a_layer_where_tokens_go() -> None:
    """The table of docs/guides/speed.md names this read, by transformers' dispatch; there is no other."""
    for spread, whole in run_ranks(traffic_of_experts, 2, timeout_s=900.0, kind="imagined"):
        further = sum(spread["reads"].values()) - sum(whole["reads"].values())
        assert further == LAYERS * MICROBATCHES, (spread["reads"], whole["reads"])
        assert spread["uploads"] == whole["uploads"]
        assert not spread["lost"]


def test_experts_on_ranks_equal_one_process_on_an_imagined_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.strategies.test_expert_layouts.run_ranks", partial(run_ranks, kind="imagined"))
    compare("qwen3_moe", [(EXPERTS, "sequence")])
