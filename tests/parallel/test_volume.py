"""What a layer of a whole model moves between context-parallel ranks: what the formulas say, nothing else."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.alignment import Alignment
from lightning_thd.parallel import shard_batch
from tests.ranks import run_ranks
from tests.strategies.jobs import family_model
from tests.tiny import sequences

LAYERS, HEADS, KV_HEADS, HEAD_SIZE, ELEMENT = 2, 8, 4, 8, 8  # of family_model("qwen3") in fp64
WAYS = list(product(["dual_chunk", "contiguous"], ["all_gather", "ulysses"]))


class Received(TorchDispatchMode):
    """Counts the bytes that collectives of any kind bring here from other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional"):
            # The larger side holds the parts of all ranks, of which one is this rank's own.
            sizes = [x.nbytes for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            name = str(func.overloadpacket).split(".")[-1].strip("_")
            ranks = dist.get_world_size()
            self.by_name[name] = self.by_name.get(name, 0) + max(sizes) * (ranks - 1) // ranks
        return func(*args, **kwargs)


def received(layout: str, communication: str) -> tuple[dict[str, int], dict[str, int], int]:
    """Bytes by collective of a forward and a backward pass, and slots of the pack."""
    cp = dist.get_world_size()
    model = family_model("qwen3")
    batch = THDBatch.collate(sequences(5, labels=True), align=Alignment.for_(cp=cp, layout=layout))
    shard = shard_batch(batch, group=dist.group.WORLD, layout=layout, communication=communication)
    with Received() as forward:
        loss = causal_lm_loss(model, shard)
    with Received() as backward:
        loss.backward()
    return forward.by_name, backward.by_name, len(batch.input_ids)


def every_way() -> list[tuple[dict[str, int], dict[str, int], int]]:
    return [received(*way) for way in WAYS]


@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_bytes_of_a_layer(cp: int) -> None:
    for found in run_ranks(every_way, cp):
        for (_, communication), (forward, backward, slots) in zip(WAYS, found, strict=True):
            assert forward.pop("allreduce") <= ELEMENT  # the loss, one number: no z-loss
            if communication == "all_gather":
                each = (cp - 1) * slots // cp * 2 * KV_HEADS * HEAD_SIZE * ELEMENT
                ways = [list(forward), list(backward)]
                assert ways == [["allgather_base"], ["reduce_scatter_base"]]
            else:
                each = (cp - 1) * (slots // cp) * (2 * HEADS + 2 * KV_HEADS) * HEAD_SIZE * ELEMENT // cp
                assert list(forward) == list(backward) == ["alltoall_base"]
            assert sum(forward.values()) == sum(backward.values()) == LAYERS * each
