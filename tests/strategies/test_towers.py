"""A model with a vision tower trains on ranks of which only some have images, as one process does."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.batch import THDStep
from lightning_thd.parallel.fsdp import layers_of, tower_paths, towers_of
from lightning_thd.parallel.sequence import apply_sequence_parallel
from tests.models.test_vision import IMAGE, build, sample
from tests.ranks import run_ranks
from tests.strategies.jobs import Layout, family_model, full_parameters, make_optimizer, make_trainer
from tests.tiny import largest_error

MLP = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}  # the tower is cut as well
ONE = [(1, 4, 4)]
TWO = [(1, 4, 8), (1, 4, 4)]
NONE = []
# By step, rank and microbatch. The third step has no image at all: AdamW leaves the tower alone.
GRIDS: list[list[list[list[tuple[int, int, int]]]]] = [
    [[ONE, NONE], [NONE, NONE]],
    [[NONE, NONE], [NONE, TWO]],
    [[NONE, NONE], [NONE, NONE]],
    [[ONE, TWO], [NONE, ONE]],
]


class Sees(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model: Any = build("qwen2_5_vl", "thd").double()
        self.model._tp_plan |= {f"model.visual.blocks.*.mlp.{name}": style for name, style in MLP.items()}

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        return causal_lm_loss(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.model)


def steps(model: Any) -> list[list[THDStep]]:
    """Make the steps of every rank."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for step in GRIDS:
        ranks = [[pack_of(model, grids, generator) for grids in rank] for rank in step]
        tokens = sum(batch.loss_tokens for rank in ranks for batch in rank)
        made.append([THDStep([b.replace(loss_scale=4 / tokens) for b in rank]) for rank in ranks])
    return made


def pack_of(model: Any, grids: list[tuple[int, int, int]], generator: torch.Generator) -> THDBatch:
    row: dict[str, Any] = sample(grids, generator)
    ids = row["input_ids"][None]
    grid = row.get("image_grid_thw")
    positions, _ = model.model.get_rope_index(ids, (ids == IMAGE).int(), image_grid_thw=grid)
    row["position_ids"] = positions[:, 0]
    if grids:
        row["pixel_values"] = row["pixel_values"].double()
    return THDBatch.collate([row])


def train(layout: Layout) -> dict[str, Tensor]:
    module = Sees()
    rank = 0 if layout.dp == 1 else dist.get_rank() // layout.tp
    batches = [ranks[rank] for ranks in steps(module.model)]
    module.model.model.visual.requires_grad_(layout.tp != 1 or layout.strategy == "thd_ddp")
    make_trainer(layout, max_steps=0).fit(module, DataLoader(batches, batch_size=None))
    module.model.requires_grad_(True)  # a second fit trains the tower that the first one froze
    trainer = make_trainer(
        layout, gradient_clip_val=None, max_steps=len(GRIDS), use_distributed_sampler=False
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))
    assert trainer.global_step == len(GRIDS)
    return full_parameters(module.model)


def train_all(layouts: list[Layout]) -> list[dict[str, Tensor]]:
    return [train(layout) for layout in layouts]


def by_hand() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = build("qwen2_5_vl", "thd").double()
    before = full_parameters(model)
    optimizer = make_optimizer(model)
    for ranks in steps(model):
        optimizer.zero_grad()
        for batch in (batch for step in ranks for batch in step.microbatches):
            (causal_lm_loss(model, batch) / 4).backward()
        optimizer.step()
    return before, full_parameters(model)


FSDP_AND_DDP = [Layout(dp=2), Layout(strategy="thd_ddp", dp=2)]
TENSOR = [Layout(dp=2, tp=2)]


@pytest.mark.parametrize("layouts", [FSDP_AND_DDP, pytest.param(TENSOR, marks=pytest.mark.slow)])
def test_ranks_without_images(layouts: list[Layout]) -> None:
    before, expected = by_hand()
    assert any("visual" in name for name in expected)
    unmoved = [name for name, value in before.items() if torch.equal(expected[name], value)]
    assert unmoved == []
    ranks = run_ranks(train_all, layouts[0].world, layouts, timeout_s=120.0)
    for trained in (trained for rank in ranks for trained in rank):
        # transformers takes softmax and rotary tables of the vision tower in fp32
        assert largest_error(trained, expected) < 1e-6


def test_towers() -> None:
    vision = build("qwen2_5_vl", "thd")
    text = family_model("qwen3")
    assert towers_of(vision) == [vision.model.visual]
    assert towers_of(text) == towers_of(text.model) == towers_of(nn.Linear(2, 2)) == []
    assert layers_of(vision) == list(vision.model.language_model.layers)
    around = nn.Sequential(vision)  # a wrapper of the user's
    assert (towers_of(around), layers_of(around)) == (towers_of(vision), layers_of(vision))
    assert [*tower_paths(around)]
    with pytest.raises(ValueError, match="inserts the outputs of its tower among.*sequence_parallel=False"):
        apply_sequence_parallel(vision, None)  # type: ignore[arg-type]
