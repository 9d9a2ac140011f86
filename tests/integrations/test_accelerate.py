"""Accelerate's own features around packed steps: trackers, FSDP2, a process mesh."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from accelerate import DistributedType, FullyShardedDataParallelPlugin

from lightning_thd import Packs, Sequences
from lightning_thd.integrations.accelerate import data_rank
from tests.integrations.support import by_hand, check_ranks, make_loop
from tests.ranks import run_ranks
from tests.trackers import read_tensorboard

MFU = "train/device/mfu"


def _tracked(folder: str) -> list[float]:
    accelerator = accelerate.Accelerator(cpu=True, log_with=["tensorboard"], project_dir=folder)
    accelerator.init_trackers("thd")
    _, loop = make_loop("accelerate", Sequences(12), host=accelerator, log_every_n_steps=2)
    utilisations = []
    for batch, _ in zip(loop.loader, range(4), strict=False):
        loop.backward(batch)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        if loop.global_step % 2 == 0:
            utilisations.append(loop.latest[MFU])
    accelerator.end_training()
    return utilisations


@pytest.mark.filterwarnings("ignore")  # of the trackers' own making
def test_trackers_keep_mfu(tmp_path: Path) -> None:
    [expected] = run_ranks(_tracked, 1, str(tmp_path))
    assert len(expected) == 2
    assert all(value > 0 for value in expected)
    board = read_tensorboard(tmp_path)[MFU]
    assert board == [(2, pytest.approx(expected[0])), (4, pytest.approx(expected[1]))]


def _sharded(accumulate: int, step: Any) -> Any:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    # Accelerate shards on accelerators alone; its code of FSDP2 itself runs on gloo.
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    _, loop = make_loop("accelerate", step, host=accelerator)
    losses = []

    for batch, _ in zip(loop.loader, range(4), strict=False):
        losses.append(float(loop.backward(batch)))
        accelerator.clip_grad_norm_(loop.model.parameters(), 0.5)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.scheduler.step()

    sharded = [isinstance(p, torch.distributed.tensor.DTensor) for p in loop.model.parameters()]
    assert all(sharded)

    return {n: p.full_tensor().detach() for n, p in loop.model.named_parameters()}, losses


@pytest.mark.parametrize(
    ("step", "accumulate"), [(Packs(4), 2), pytest.param(Sequences(12), 1, marks=pytest.mark.slow)]
)
def test_fsdp2_equals_the_hand_loop(step: Any, accumulate: int) -> None:
    check_ranks(run_ranks(_sharded, 2, accumulate, step), *by_hand(step, 2, steps=4), 1e-12)


def _rank_in(sizes: dict[str, int]) -> tuple[int, int]:
    # An Accelerator on CPUs takes no mesh; config and mesh are the real ones.
    config = accelerate.ParallelismConfig(**sizes)
    mesh = config.build_device_mesh("cpu")
    rank, ranks, group = data_rank(SimpleNamespace(parallelism_config=config, torch_device_mesh=mesh))
    # Without a group tokens would be counted over the world.
    assert torch.distributed.get_world_size(group) == ranks
    assert torch.distributed.get_rank(group) == rank
    return rank, ranks


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ({"dp_replicate_size": 2}, [(0, 2), (1, 2)]),
        ({"tp_size": 2}, [(0, 1), (0, 1)]),
        ({"dp_shard_size": 2, "tp_size": 2}, [(0, 2), (0, 2), (1, 2), (1, 2)]),
    ],
)
def test_the_mesh_says_who_reads_what(sizes: dict[str, int], wanted: list[tuple[int, int]]) -> None:
    assert run_ranks(_rank_in, len(wanted), sizes) == wanted
