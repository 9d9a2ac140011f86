"""Ranks about to run different things are told so, all of them, before any of them waits for the others."""

from __future__ import annotations

from dataclasses import make_dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_thd import THDBatch, THDDDPStrategy
from lightning_thd.batch import THDStep
from lightning_thd.parallel.context.dynamic_step import DynamicStep, make_degree_groups
from lightning_thd.parallel.mesh import AxisSizes
from lightning_thd.strategies.axes import Axes
from lightning_thd.strategies.pack_cut import PackCut
from tests.ranks import run_ranks
from tests.strategies.jobs import Layout
from tests.tiny import sequences


def batch(seed: int = 0, **fields: Any) -> THDBatch:
    return THDBatch.collate(sequences(3, seed=seed), align=Layout(cp=2).align, **fields)


STEP = ("microbatches", "scales")
PEERS = ("peers", "in a dict", "images")
CASES = ("same", *PEERS, "data ranks", *STEP, "plans", "shared packs")


def compare(case: str) -> str:
    """Compare what four ranks would run; ranks 0 and 1 share packs, and so do 2 and 3. Return the message."""
    rank = dist.get_rank()
    data_rank = rank // 2
    images = torch.full((2, 3), rank).bfloat16()
    loaded: Any = {
        "same": batch(),
        "peers": batch(seed=rank),
        "in a dict": {"text": [make_dataclass("Pair", ["pack"])(batch(seed=rank))]},
        "images": batch(seed=data_rank).replace(extras={"pixel_values": images}),
        "data ranks": batch(seed=data_rank),
        "microbatches": THDStep([batch(seed=data_rank)] * (1 + data_rank)),
        "scales": THDStep([batch(seed=data_rank, loss_scale=1.0 + data_rank)]),
        "plans": DynamicStep([batch(seed=data_rank)], [2], rank),
        "shared packs": DynamicStep([batch(seed=rank)], [2], 0),
    }[case]

    device = torch.device("cpu")
    axes = Axes(
        sizes=AxisSizes(data=2, context=2),
        collective_device=device,
        meshes=None,
        degree_groups=make_degree_groups(4, 2, tp=1, device=device),
    )
    strategy = THDDDPStrategy(context_parallel_size=2)
    try:
        PackCut(strategy, axes).compare(loaded)
    except ValueError as err:
        return str(err)
    return ""


def compare_all() -> dict[str, str]:
    return {case: compare(case) for case in CASES}


def test_messages_on_every_rank() -> None:
    for messages in run_ranks(compare_all, 4):
        assert messages["same"] == messages["data ranks"] == ""
        for case in PEERS:
            assert "share one pack (2 context-parallel x 1 tensor-parallel" in messages[case], case
        for case in STEP:
            assert "steps with different numbers of microbatches or loss scales" in messages[case], case
        assert "different plans of a step, which hangs or changes the loss. Plan" in messages["plans"]
        assert "2 ranks share one pack but read different ones" in messages["shared packs"]
