"""Tensor-parallel ranks draw the same random numbers, and other ranks and microbatches others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_thd import Sequences
from tests.ranks import run_ranks
from tests.strategies.jobs import Job, Layout, data, full_parameters, make_trainer


class Drops(Job):
    """Drops half of what goes into the head, and keeps a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []
        self.model.model.norm.register_forward_hook(self.drop)

    def drop(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.masks.append(torch.rand_like(output) < 0.5)
        return output * self.masks[-1]


def train_dropping(layout: Layout, folder: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Train two steps, and the second again from a checkpoint; return parameters and masks."""
    torch.manual_seed(dist.get_rank())  # as seed + rank would
    module = Drops()
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(layout, max_steps=2, callbacks=[saver], enable_checkpointing=True)
    trainer.fit(module, data(Sequences(12)))

    resumed = Drops()
    make_trainer(layout, max_steps=2).fit(resumed, data(Sequences(12)), ckpt_path=f"{folder}/step=1.ckpt")
    assert 0 < len(resumed.masks) < len(module.masks)
    torch.testing.assert_close(resumed.masks, module.masks[-len(resumed.masks) :], rtol=0, atol=0)
    return full_parameters(module.model), module.masks


@pytest.mark.parametrize("layout", [Layout(tp=2), pytest.param(Layout(tp=2, dp=2), marks=pytest.mark.slow)])
def test_tensor_parallel_ranks_drop_the_same_activations(layout: Layout, tmp_path: Path) -> None:
    ranks = run_ranks(train_dropping, layout.world, layout, str(tmp_path))
    for (_, masks), (_, masks_of_neighbour) in zip(ranks[::2], ranks[1::2], strict=True):
        torch.testing.assert_close(masks, masks_of_neighbour, rtol=0, atol=0)

    different = [mask for _, masks in ranks[::2] for mask in masks]
    for i, mask in enumerate(different):
        assert not any(torch.equal(mask, before) for before in different[:i])

    first_params, _ = ranks[0]
    for params, _ in ranks[1:]:
        torch.testing.assert_close(params, first_params, rtol=0, atol=0)
