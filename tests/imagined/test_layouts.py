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

from lightning_thd import Packs, Sequences
from tests.imagined import gpu, nccl
from tests.imagined.run import traffic
from tests.imagined.support import needs_imagination, our_reads, our_uploads
from tests.ranks import run_ranks
from tests.strategies import jobs
from tests.strategies.jobs import Layout, check_stages, train_by_hand
from tests.strategies.test_expert_layouts import compare
from tests.strategies.test_layouts import check

pytestmark = [pytest.mark.imagined, needs_imagination]


def _way(communication: str, layout: str) -> dict[str, str]:
    return {"context_parallel_communication": communication, "context_parallel_layout": layout}


_INTERLEAVED = {"pipeline_schedule": "interleaved", "stages_per_rank": 2}
_SEQUENCE_PARALLEL = {"sequence_parallel": True}
LAYOUTS: dict[str, tuple[str, Layout, Packs | Sequences]] = {
    "ddp": ("qwen3", Layout(strategy="thd_ddp", dp=2), Packs(4)),
    "fsdp": ("qwen3", Layout(dp=2), Sequences(12)),
    "experts": ("qwen3_moe", Layout(dp=2), Sequences(12)),
    "tp": ("lfm2", Layout(tp=2), Packs(2)),
    "sp": ("qwen3", Layout(tp=2, options=_SEQUENCE_PARALLEL), Sequences(12)),
    "pp": ("qwen3", Layout(pp=2), Sequences(20)),
    "pp interleaved": ("qwen3@4t", Layout(pp=2, options=_INTERLEAVED), Sequences(20)),
    "cp needed": ("qwen3", Layout(strategy="thd_ddp", cp=2), Sequences(12)),
    "cp all_gather": ("mistral", Layout(cp=2, options=_way("all_gather", "striped")), Packs(2)),
    "cp ulysses": ("qwen3", Layout(cp=2, options=_way("ulysses", "contiguous")), Packs(2)),
    "cp ring": ("lfm2", Layout(strategy="thd_ddp", cp=2, options=_way("ring", "dual_chunk")), Packs(2)),
    "cp mixed": ("qwen3_moe", Layout(cp=2, options=_way("needed", "mixed")), Sequences(12)),
    "dp4": ("qwen3", Layout(dp=4), Packs(8)),
    "replicas": ("qwen3", Layout(dp=4, options={"data_parallel_replicas": 2}), Sequences(24)),
    "tp4": ("qwen3", Layout(tp=4), Packs(2)),
    "dp x cp": ("mistral", Layout(strategy="thd_ddp", dp=2, cp=2), Packs(4)),
    "dp x tp": ("qwen3_moe", Layout(dp=2, tp=2), Sequences(24)),
    "dp x sp": ("gemma3", Layout(dp=2, tp=2, options=_SEQUENCE_PARALLEL), Sequences(24)),
    "cp x tp": ("qwen3_moe", Layout(cp=2, tp=2), Sequences(12)),
    "cp x sp": ("qwen3", Layout(cp=2, tp=2, options=_SEQUENCE_PARALLEL), Sequences(12)),
    "cp4 ring": ("qwen3", Layout(cp=4, options=_way("ring", "contiguous")), Sequences(12)),
    "cp4 ulysses": ("qwen3", Layout(cp=4, options=_way("ulysses", "dual_chunk")), Packs(2)),
    "cp4 all_gather": ("lfm2", Layout(cp=4, options=_way("all_gather", "contiguous")), Packs(2)),
    "pp4": ("qwen3@4", Layout(pp=4), Sequences(40)),
    "pp x dp": ("qwen3", Layout(pp=2, dp=2), Packs(8)),
    "pp x cp": ("qwen3", Layout(pp=2, cp=2), Sequences(20)),
    "pp x tp": ("qwen3@4t", Layout(pp=2, tp=2), Sequences(20)),
    "pp x sp interleaved": (
        "qwen3_moe@4",
        Layout(pp=2, tp=2, options=_SEQUENCE_PARALLEL | _INTERLEAVED),
        Sequences(20),
    ),
}

# In fp32 four layers of experts round a score so that a token goes to another expert; the rest is in fp32.
IN_FP64 = {"pp x sp interleaved"}


def dtype_of(name: str) -> torch.dtype:
    return torch.float64 if name in IN_FP64 else torch.float32


def train(name: str) -> dict[str, Any]:
    """Train one layout on this rank; return what it trained, its traffic and messages never waited for."""
    gpu.LOG.clear()
    nccl.CALLS.clear()
    gpu.LOG.step = 0
    found = jobs.train(*LAYOUTS[name], dtype_of(name))
    lost = sorted({call[1] for call in nccl.CALLS if call[0] == "never waited"})
    return {**found, **traffic(gpu.LOG), "lost": lost}


def train_all(names: tuple[str, ...]) -> list[dict[str, Any]]:
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    assert dist.get_backend() == "nccl"
    return [train(name) for name in names]


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
