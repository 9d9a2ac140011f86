"""The bytes that ways of communicating move, and the way that ``auto`` chooses."""

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
from lightning_thd.attention.context_parallel import choose_way
from lightning_thd.attention.spec import make_spec
from lightning_thd.parallel import shard_batch
from lightning_thd.parallel.context import costs
from lightning_thd.parallel.context.costs import LayerSizes
from lightning_thd.parallel.context.layout import ShardLayout
from tests.ranks import run_ranks
from tests.strategies.jobs import family_model
from tests.tiny import sequences


def chosen(
    lengths: list[int], layout: str, *, cp: int = 4, heads: int = 32, window: int | None = None
) -> str:
    shard = ShardLayout(lengths, cp=cp, rank=0, layout=layout)
    sizes = LayerSizes(heads=heads, kv_heads=8, head_size=128, value_size=128, element_bytes=2)
    return choose_way(shard, sizes, make_spec(128, window=window))


def test_the_fewest_bytes_win_where_kernels_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "FLOPS_PER_S", 1e30)
    monkeypatch.setattr(costs, "LATENCY_S", 0.0)
    assert chosen([512] * 64, "contiguous") == "needed"
    assert chosen([32_768], "dual_chunk") == "needed"  # 36 of 48 units, ulysses 60
    assert chosen([32_768], "dual_chunk", cp=8) == "ulysses"
    assert chosen([32_768], "dual_chunk", cp=8, window=1024) == "needed"
    assert chosen([32_768], "dual_chunk", cp=8, heads=36) == "needed"  # 36 / 8 heads a rank


def test_an_uneven_kernel_is_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # One long sequence cut in stretches: the last rank has 7 / 16 of the work, with heads each has a quarter.
    monkeypatch.setattr(costs, "FLOPS_PER_S", 1e12)
    assert chosen([65_536], "contiguous") == "ulysses"


LAYERS = 2  # of family_model("qwen3") in fp64
HEADS = 8
KV_HEADS = 4
HEAD_SIZE = 8
ELEMENT = 8
WAYS = list(product(["dual_chunk", "contiguous"], ["all_gather", "ulysses"]))


class Received(TorchDispatchMode):
    """Counts the bytes that collectives of any kind bring here from other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            # The larger side holds the parts of all ranks, of which one is this rank's own.
            most = max(x.nbytes for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
            name = str(func.overloadpacket).split(".")[-1].strip("_")
            ranks = dist.get_world_size()
            self.by_name[name] = self.by_name.get(name, 0) + most * (ranks - 1) // ranks
        return func(*args, **(kwargs or {}))


def received() -> list[tuple[dict[str, int], dict[str, int], int]]:
    """Return the bytes by collective of a forward and a backward pass, and the slots, in every way."""
    traffic_of_ways = []
    model = family_model("qwen3")
    for layout, communication in WAYS:
        align = Alignment.for_(cp=dist.get_world_size(), layout=layout)
        batch = THDBatch.collate(sequences(5, labels=True), align=align)
        shard = shard_batch(batch, group=dist.group.WORLD, layout=layout, communication=communication)
        with Received() as forward:
            loss = causal_lm_loss(model, shard)
        with Received() as backward:
            loss.backward()
        traffic_of_ways.append((forward.by_name, backward.by_name, len(batch.input_ids)))
    return traffic_of_ways


@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_layer_moves_what_the_formulas_say_and_nothing_else(cp: int) -> None:
    for of_rank in run_ranks(received, cp):
        for (_, communication), (forward, backward, slots) in zip(WAYS, of_rank, strict=True):
            assert forward.pop("allreduce") <= ELEMENT  # the loss, one number: no z-loss
            if communication == "all_gather":
                each = (cp - 1) * slots // cp * 2 * KV_HEADS * HEAD_SIZE * ELEMENT
                assert [*forward, *backward] == ["allgather_base", "reduce_scatter_base"]
            else:
                each = (cp - 1) * (slots // cp) * (2 * HEADS + 2 * KV_HEADS) * HEAD_SIZE * ELEMENT // cp
                assert [*forward, *backward] == ["alltoall_base"] * 2
            assert sum(forward.values()) == sum(backward.values()) == LAYERS * each
