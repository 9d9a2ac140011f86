"""Attention of shards, put together, is attention of the pack; so are its gradients, on every way."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_thd.attention import varlen_attention
from lightning_thd.boundaries import Boundaries
from lightning_thd.parallel.context import traffic
from lightning_thd.parallel.context.layout import ShardBoundaries, ShardLayout, gather_pack
from lightning_thd.parallel.context.needs import need_counts
from lightning_thd.seqlens import cu_seqlens_from_lengths
from tests.ranks import run_ranks

LENGTHS = [8, 24, 8, 0, 40, 16]
LAYOUTS = ["dual_chunk", "contiguous", "striped", "mixed"]
WAYS = list(product(LAYOUTS, ["all_gather", "ulysses", "needed", "ring", "auto"]))
AHEAD = {"causal": False, "window": (2, 2)}
SAMPLED = 7  # one combination of options and way in so many; a prime, so that ways and options alternate
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 5},
    {"window": 1},
    {"window": 200, "softcap": 3.0},
    {"causal": False},
    {"scale": 0.7, "sinks": True},
]


def tensors(heads: int, kv_heads: int, value_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    slots = sum(LENGTHS)
    shapes = [
        (slots, heads, 8),
        (slots, kv_heads, 8),
        (slots, kv_heads, value_size),
        (slots, heads, value_size),
    ]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def sinks_of(options: dict[str, Any], heads: int) -> Tensor | None:
    return (
        torch.linspace(-1, 1, heads, dtype=torch.float64).requires_grad_() if options.get("sinks") else None
    )


def whole(heads: int, kv_heads: int, value_size: int, options: dict[str, Any]) -> list[Tensor]:
    q, k, v, grad = tensors(heads, kv_heads, value_size)
    sinks = sinks_of(options, heads)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    offsets = cu_seqlens_from_lengths(LENGTHS)
    out = varlen_attention(*inputs, offsets, offsets, 40, 40, **{**options, "sinks": sinks})
    out.backward(grad)
    found = [out.detach(), *(x.grad for x in inputs)]
    return found if sinks is None else [*found, sinks.grad]


def shard_of(layout: str = "dual_chunk", communication: str = "auto") -> ShardLayout:
    group: Any = dist.group.WORLD
    return ShardLayout(
        LENGTHS, cp=group.size(), rank=group.rank(), group=group, layout=layout, communication=communication
    )


def boundaries_of(at: ShardLayout) -> ShardBoundaries:
    return ShardBoundaries.of(Boundaries.from_lengths(LENGTHS), at)


def sharded(
    heads: int, kv_heads: int, value_size: int, options: dict[str, Any], layout: str, communication: str
) -> list[Tensor]:
    at = shard_of(layout, communication)
    q, k, v, grad = (x[at.own] for x in tensors(heads, kv_heads, value_size))
    sinks = sinks_of(options, heads)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = varlen_attention(*inputs, boundaries_of(at), **{**options, "sinks": sinks})
    out.backward(grad)
    found = [gather_pack(x, at) for x in (out.detach(), *(x.grad for x in inputs))]
    if sinks is not None:
        dist.all_reduce(sinks.grad)
        found.append(sinks.grad)
    return found


def compare_all(
    heads: int, kv_heads: int, value_size: int, every: list[dict[str, Any]], one_in: int
) -> float:
    """Largest relative error over options and ways, all or one in so many."""
    worst = 0.0
    for options, (layout, communication) in list(product(every, WAYS))[::one_in]:
        wanted = whole(heads, kv_heads, value_size, options)
        found = sharded(heads, kv_heads, value_size, options, layout, communication)
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            worst = max(worst, float((a - b).norm() / b.norm().clamp_min(1.0)))
    return worst


@pytest.mark.parametrize(
    ("cp", "heads", "kv_heads", "value_size", "one_in"),
    [
        (2, 4, 2, 8, SAMPLED),
        (4, 12, 6, 8, SAMPLED),
        pytest.param(2, 4, 2, 8, 1, marks=pytest.mark.slow),
        pytest.param(4, 12, 6, 8, 1, marks=pytest.mark.slow),
        pytest.param(4, 4, 2, 8, 1, marks=pytest.mark.slow),
        pytest.param(4, 8, 1, 6, 1, marks=pytest.mark.slow),
    ],
)
def test_shards_equal_the_pack(cp: int, heads: int, kv_heads: int, value_size: int, one_in: int) -> None:
    every = OPTIONS if heads == 4 else OPTIONS[:2]
    # fp64: sums of other ranks' parts in another order, nothing else.
    assert max(run_ranks(compare_all, cp, heads, kv_heads, value_size, every, one_in)) < 1e-13


REFUSED: list[tuple[str, int, dict[str, Any], str]] = [
    *((way, 4, AHEAD, f"'{way}' supports only.*'ulysses'") for way in ("all_gather", "needed", "ring")),
    ("ulysses", 3, AHEAD, "3 query heads.*multiple of 2"),
    ("ring", 4, {"backend": "te"}, "backend='te'.*needs_lse=True"),
]


def all_refusals() -> None:
    """Windows that look ahead, a backend whose results cannot be merged, and other numbers of slots."""
    q, k, v, _ = tensors(4, 2, 8)
    for communication, heads, options, message in REFUSED:
        at = shard_of(communication=communication)
        given = q[at.own, :heads], k[at.own, :1], v[at.own, :1]
        with pytest.raises(ValueError, match=message):
            varlen_attention(*given, boundaries_of(at), **options)
    at = shard_of("striped", "ring")
    inputs = [x[at.own].requires_grad_() for x in tensors(4, 2, 8)[:3]]
    out = varlen_attention(*inputs, boundaries_of(at), softcap=3.0)
    for made in (out, gather_pack(inputs[0], at)):
        (grad,) = torch.autograd.grad(made.square().sum(), inputs[0], create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            grad.sum().backward()
    with pytest.raises(ValueError, match="rows, but the boundaries have .* slots. Pass the boundaries"):
        varlen_attention(q, k, v, boundaries_of(at))


def test_refusals() -> None:
    run_ranks(all_refusals, 2)


def half_precision(communication: str, layout: str) -> float:
    """Error of bf16 shards against the pack in fp64, over that of the pack in bf16."""
    spread = []
    for dtype, cut in ((torch.float64, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        q, k, v, grad = (x.to(dtype) for x in tensors(4, 2, 8))
        at = shard_of(layout, communication)
        boundaries = boundaries_of(at) if cut else Boundaries.from_lengths(LENGTHS)
        own = at.own if cut else slice(None)
        inputs = [x[own].requires_grad_() for x in (q, k, v)]
        out = varlen_attention(*inputs, boundaries)
        out.backward(grad[own])
        found = [out.detach(), *(x.grad for x in inputs)]
        assert all(x.dtype == dtype for x in found)
        spread.append([gather_pack(x, at).double() if cut else x.double() for x in found])
    exact, whole_pack, shards = spread
    errors = [
        [float((a - b).norm()) for a, b in zip(one, exact, strict=True)] for one in (shards, whole_pack)
    ]
    return max(a / b for a, b in zip(*errors, strict=True))


@pytest.mark.parametrize(("layout", "communication"), [("striped", "needed")])
def test_parts_in_half_precision_are_merged_in_single(layout: str, communication: str) -> None:
    # Parts are rounded to bf16 before they are merged in fp32: as many roundings again as the pack has.
    assert max(run_ranks(half_precision, 2, communication, layout)) < 2.0


def exchanged_bytes() -> None:
    """Bytes received by an attention that is checkpointed, as ``traffic`` counts and as formulas say."""
    for layout, way in product(LAYOUTS, ("needed", "ring")):
        at = shard_of(layout, way)
        inputs = [x[at.own].requires_grad_() for x in tensors(4, 2, 8)[:3]]
        attend = partial(varlen_attention, *inputs, boundaries_of(at))
        traffic.read_and_reset()
        checkpoint(attend, use_reentrant=False).sum().backward()  # type: ignore[no-untyped-call]
        counts = need_counts(LENGTHS, cp=dist.get_world_size(), layout=layout)
        # Keys arrive in both forward passes, and in a ring's backward; gradients of the keys that were sent.
        rows = (3 if way == "ring" else 2) * counts[dist.get_rank()].sum() + counts[:, dist.get_rank()].sum()
        assert traffic.read_and_reset().received_bytes == rows * 2 * 2 * 8 * 8


def test_needed_exchange_receives_what_the_formula_says() -> None:
    run_ranks(exchanged_bytes, 4)
