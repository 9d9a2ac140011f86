"""Messages about what a loss is given that no other test of the room meets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_thd.batch import THDBatch
from lightning_thd.loss import (
    PackedRollouts,
    causal_lm_loss,
    fused_linear_logprobs,
    mtp_targets,
)
from lightning_thd.loss.policy import group_advantages
from lightning_thd.loss.preference import sequence_sums
from lightning_thd.parallel.shard import shard_batch
from tests.loss.families import build
from tests.loss.support import make_batch
from tests.ranks import pretended_ranks

HIDDEN, WEIGHT, TARGETS = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.long)
IDS, MASK = torch.arange(12).view(2, 6), torch.ones(2, 6, dtype=torch.long)
OFFSETS = torch.tensor([0, 3], dtype=torch.int32)


def batch() -> THDBatch:
    return THDBatch.collate([{"input_ids": [1, 2, 3]}])


def shard() -> THDBatch:
    return shard_batch(make_batch(lengths=(4,)), group=None, cp=2, rank=0)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "rows on another device": (
        lambda: fused_linear_logprobs(HIDDEN, WEIGHT, TARGETS, rows=TARGETS.to("meta")),
        "rows is on meta and hidden on cpu, wanted one device. Move",
    ),
    "targets of floats": (
        lambda: mtp_targets(HIDDEN[0], OFFSETS, 1),
        r"targets is torch.float32 \[4\], wanted int64 \[T\]. Pass batch.targets",
    ),
    "rewards of integers": (lambda: group_advantages(TARGETS, 3), r"rewards is torch.int64 \[3\] with"),
    "sums of integers": (
        lambda: sequence_sums(TARGETS, batch()),
        r"values is torch.int64 \[3\], wanted floats \[3\], one a slot",
    ),
    "sums of a shard": (
        lambda: sequence_sums(torch.zeros(2), shard()),
        "The batch is one rank's shard, whose slots hold parts of sequences",
    ),
    "rollouts of floats": (
        lambda: PackedRollouts.from_padded(IDS.float(), MASK),
        "input_ids is torch.float32; wanted an integer dtype",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_message(case: str) -> None:
    call, message = CASES[case]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_weights_do_not_reach_further_tokens() -> None:
    model = build("Granite")
    inner = model.forward

    def forward(**kwargs: Any) -> Any:
        outputs = inner(**kwargs, output_hidden_states=True)
        model.lm_head(outputs.hidden_states[-1])
        return outputs

    model.forward = forward
    with pytest.raises(
        ValueError, match="Weights and reduction='sequences' say nothing of predictions further"
    ):
        causal_lm_loss(model, make_batch(), reduction="sequences")


def test_a_balancing_loss_without_its_coefficient() -> None:
    model = build("Llama")
    inner = model.forward

    def forward(**kwargs: Any) -> Any:
        outputs = inner(**kwargs)
        outputs.aux_loss = torch.tensor(1.0)
        return outputs

    model.forward = forward
    with pytest.raises(
        ValueError, match="returned an auxiliary loss, but neither it nor its config has router"
    ):
        causal_lm_loss(model, make_batch())


def test_a_head_cut_in_other_ways() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with pretended_ranks(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for placements in ([Shard(0), Shard(0)], [Replicate(), Shard(1)]):
            weight = distribute_tensor(torch.zeros(8, 4), mesh, placements)
            with pytest.raises(
                ValueError, match=r"head's weight is placed as .*, wanted rows of the vocabulary"
            ):
                fused_linear_logprobs(HIDDEN, weight, TARGETS)
        weight = distribute_tensor(torch.zeros(8, 4), mesh, [Replicate(), Shard(0)])
        with pytest.raises(ValueError, match=r"and tp_group another group, .*Leave tp_group out, or pass"):
            fused_linear_logprobs(HIDDEN, weight, TARGETS, tp_group=dist.group.WORLD)
        weight = distribute_tensor(torch.zeros(8, 4), init_device_mesh("cpu", (4,)), [Shard(0)])
        with pytest.raises(ValueError, match=r"unknown whether the ranks hold the same tokens.*fully_shard"):
            fused_linear_logprobs(HIDDEN, weight, TARGETS)
