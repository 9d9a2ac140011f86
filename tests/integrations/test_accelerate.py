"""Accelerate's own features around packed steps: trackers, bf16, FSDP2, a process mesh."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from accelerate import DistributedType, FullyShardedDataParallelPlugin

from lightning_thd import Packs, Sequences, prepare_thd
from lightning_thd.batch import THDBatch
from lightning_thd.integrations.accelerate import data_rank
from tests.integrations.support import STEPS, by_hand, make_data, run, same
from tests.ranks import run_ranks
from tests.tiny import TinyModule, tiny_llama
from tests.trackers import read_tensorboard, read_wandb

MFU = "train/device/mfu"


def _loop(accelerator: Any, step: Any, model: torch.nn.Module | None = None, **kwargs: Any) -> Any:
    model = tiny_llama() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=TinyModule().lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return prepare_thd(accelerator, model, make_data(step), optimizer, schedule, peak=1e9, **kwargs)


def _tracked(folder: str, trackers: list[str]) -> list[float]:
    os.environ.update(WANDB_MODE="offline", WANDB_DIR=folder, WANDB_SILENT="true")
    accelerator = accelerate.Accelerator(cpu=True, log_with=trackers, project_dir=folder)
    accelerator.init_trackers("thd")
    loop = _loop(accelerator, Sequences(12), log_every_n_steps=2)
    found = []
    for batch, _ in zip(loop.loader, range(4), strict=False):
        loop.backward(batch)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        if loop.global_step % 2 == 0:
            found.append(loop.latest[MFU])
    accelerator.end_training()
    return found


@pytest.mark.filterwarnings("ignore")  # of the trackers' own making
@pytest.mark.parametrize(
    "trackers", [["tensorboard"], pytest.param(["tensorboard", "wandb"], marks=pytest.mark.slow)]
)
def test_trackers_keep_mfu(trackers: list[str], tmp_path: Path) -> None:
    [wanted] = run_ranks(_tracked, 1, str(tmp_path), trackers)
    assert len(wanted) == 2
    assert all(value > 0 for value in wanted)
    board = read_tensorboard(tmp_path)[MFU]
    assert board == [(2, pytest.approx(wanted[0])), (4, pytest.approx(wanted[1]))]
    if "wandb" in trackers:
        rows = [row for row in read_wandb(tmp_path) if MFU in row]
        assert [(row["_step"], row[MFU]) for row in rows] == [(2, wanted[0]), (4, wanted[1])]
        assert all("train/device/tflops_per_gpu" in row and "train/packing/fill" in row for row in rows)


def _mixed() -> tuple[list[float], list[float], set[torch.dtype]]:
    seen: set[torch.dtype] = set()

    def loss_fn(model: torch.nn.Module, batch: THDBatch) -> torch.Tensor:
        from lightning_thd import causal_lm_loss

        return causal_lm_loss(model, batch)

    losses = []
    for precision in ("no", "bf16"):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        model = tiny_llama(torch.float32)
        projection = model.model.layers[0].mlp.down_proj  # type: ignore[union-attr,index]
        projection.register_forward_hook(lambda m, i, out: seen.add(out.dtype))
        loop = _loop(accelerator, Sequences(12), model, loss_fn=loss_fn)
        losses.append(run(loop, STEPS)[1])
        assert all(p.dtype == torch.float32 for p in model.parameters())
    return losses[0], losses[1], seen


def test_bf16_runs_in_bf16_and_trains_alike() -> None:
    [(plain, mixed, dtypes)] = run_ranks(_mixed, 1)
    assert dtypes == {torch.float32, torch.bfloat16}
    assert mixed == pytest.approx(plain, rel=2e-2)  # three significant digits of bf16, over five steps
    assert mixed != plain


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
    loop = _loop(accelerator, step)
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
    ranks = run_ranks(_sharded, 2, accumulate, step)
    wanted, losses = by_hand(step, 2, steps=4)
    assert same(ranks[0][0], wanted)
    means = [(a + b) / 2 for a, b in zip(ranks[0][1], ranks[1][1], strict=True)]
    assert means == pytest.approx(losses, rel=1e-12)


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
