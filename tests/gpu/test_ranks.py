"""Layouts of several ranks on the real NCCL give one process's parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_thd import CUDAGraphCallback, Packs, THDBatch, causal_lm_loss
from tests.device_reads import ON_GPU
from tests.ranks import run_ranks
from tests.strategies import jobs
from tests.strategies.jobs import Layout
from tests.strategies.layouts import LAYOUTS, check_layout
from tests.strategies.test_layouts import check

pytestmark = ON_GPU
GRAPHS = ("qwen3", Layout(strategy="thd_ddp", dp=2), Packs(4), torch.float32)


def dtype_of(name: str) -> torch.dtype:
    """Return fp64, as in fp32 a token may go to another expert; Gemma 3 computes in fp32 in any case."""
    return torch.float32 if LAYOUTS[name][0] == "gemma3" else torch.float64


def train(name: str) -> dict[str, Any]:
    return jobs.train(*LAYOUTS[name], dtype_of(name))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(name: str) -> None:
    ranks = run_ranks(train, LAYOUTS[name][1].world, name, kind="nccl", timeout_s=300.0)
    check_layout(name, ranks, dtype_of(name))


class Counted(jobs.Job):
    """Counts outside of ``training_step``, which a graph records."""

    def on_train_batch_start(self, batch: THDBatch, batch_idx: int) -> None:
        self.real_tokens.append(batch.stats.real_tokens)

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        loss = causal_lm_loss(self.model, batch)
        self.log("train/loss", loss.detach(), sync_dist=True)
        return loss


def train_in_graphs() -> dict[str, Any]:
    graphs = CUDAGraphCallback(max_sequences=(12, 24), require=True)
    trained = jobs.train(*GRAPHS, {"callbacks": [graphs]}, Counted)
    return {**trained, "captured": graphs.stats.replays + graphs.stats.fallbacks["slower"]}


def test_graphs_on_two_ranks() -> None:
    ranks = run_ranks(train_in_graphs, 2, kind="nccl", timeout_s=300.0)
    check(*GRAPHS, ranks)
    assert all(rank["captured"] > 0 for rank in ranks)
