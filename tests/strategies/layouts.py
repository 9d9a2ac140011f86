"""A layout of every kind, on two and on four ranks, for GPUs that are imagined or real."""

from __future__ import annotations

from typing import Any

import torch

from lightning_thd import Packs, Sequences
from tests.strategies.jobs import Layout, check_stages, train_by_hand
from tests.strategies.test_layouts import TOLERANCE, check


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


def rows(world: int, size: int) -> list[list[str]]:
    """Return names of layouts that run on one start of ranks, which takes seconds."""
    names = [name for name, (_, layout, _) in LAYOUTS.items() if layout.world == world]
    return [names[i : i + size] for i in range(0, len(names), size)]


def check_layout(name: str, found: list[dict[str, Any]], dtype: torch.dtype) -> None:
    """Compare what all ranks found with one process."""
    family, layout, step = LAYOUTS[name]
    if layout.pp == 1:
        check(family, layout, step, dtype, found)
    else:
        check_stages(found, train_by_hand(family, layout, step, dtype), TOLERANCE[dtype])
