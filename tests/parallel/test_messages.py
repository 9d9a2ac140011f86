"""Messages about ranks and schedules that no other test of the room meets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_thd.batch import THDBatch
from lightning_thd.parallel import across_ranks, shard_batch
from lightning_thd.parallel.context.shared_step import SharedStep, check_shared_agreement, cut_step
from lightning_thd.parallel.pipeline import make_schedule
from lightning_thd.parallel.pipeline.channel import Channel
from lightning_thd.parallel.tensor import apply_tensor_parallel
from tests.ranks import pretended_ranks


def batch() -> THDBatch:
    return THDBatch.collate([{"input_ids": [1, 2, 3, 4]}])


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "a shard of no group": (
        lambda: shard_batch(batch(), group=None),
        "group is None; wanted a process group, or cp= and rank=",
    ),
    "degrees without a group": (
        lambda: cut_step(SharedStep([batch()], [4], 0), {}),
        r"to be shared by 4 ranks, but groups of \[\] were made. Raise max_context_parallel_size",
    ),
    "more passes than a step can have": (
        lambda: make_schedule(1024, 2**14, chunks=2),
        r"passes=33554432; wanted at most .* It is the product of all sizes; lower one",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_message(case: str) -> None:
    call, message = CASES[case]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_other_ranks_have_another_plan_or_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    step, largest = SharedStep([batch()], [2], 7), [7]

    def all_gather(found: Tensor, mine: Tensor, group: Any = None) -> None:
        found[0], found[1] = mine[0], largest.pop()

    monkeypatch.setattr(across_ranks, "_all_gather", all_gather)
    with pretended_ranks(2):
        groups: Any = {2: dist.group.WORLD}
        largest[:] = [8]
        with pytest.raises(
            ValueError, match="different plans of a step, which hangs or changes the loss. Plan"
        ):
            check_shared_agreement(step, groups, torch.device("cpu"))
        largest[:] = [2**63 - 1, 7]
        with pytest.raises(
            ValueError, match="2 ranks share one pack but read different ones. Use THDDataModule"
        ):
            check_shared_agreement(step, groups, torch.device("cpu"))


def test_stages_of_two_precisions() -> None:
    with pretended_ranks(2):
        channel = Channel(down=dist.group.WORLD, up=dist.group.WORLD)
        channel.send(torch.ones(2), "down")
        with pytest.raises(
            ValueError, match="ends in torch.bfloat16, but the first one ended in torch.float32. Us"
        ):
            channel.send(torch.ones(2, dtype=torch.bfloat16), "down")


class Experts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(torch.zeros(count, 4, 4))

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> None:
        """Take what experts of transformers take."""


def test_experts_that_ranks_do_not_divide() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    with pretended_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(
            ValueError, match="experts has 3 experts, which 2 tensor-parallel ranks do not divide; w"
        ):
            apply_tensor_parallel(nn.ModuleDict({"experts": Experts(3)}), {"experts": "moe_tp_experts"}, mesh)
