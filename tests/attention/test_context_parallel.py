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
    """Queries, keys, values and the gradient of the output, of all slots."""
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
    """One sink per head, if the options ask for sinks."""
    if not options.get("sinks"):
        return None
    return torch.linspace(-1, 1, heads, dtype=torch.float64).requires_grad_()


def whole(heads: int, kv_heads: int, value_size: int, options: dict[str, Any]) -> list[Tensor]:
    """The output of the pack, and the gradients of queries, keys, values and sinks."""
    q, k, v, grad = tensors(heads, kv_heads, value_size)
    sinks = sinks_of(options, heads)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    offsets = cu_seqlens_from_lengths(LENGTHS)
    out = varlen_attention(*inputs, offsets, offsets, 40, 40, **{**options, "sinks": sinks})
    out.backward(grad)
    results = [out.detach(), *(x.grad for x in inputs)]
    if sinks is not None:
        results.append(sinks.grad)
    return results


def layout_of(layout: str = "dual_chunk", communication: str = "auto") -> ShardLayout:
    """This rank's shard of the pack, which all ranks share."""
    group: Any = dist.group.WORLD
    return ShardLayout(
        LENGTHS, cp=group.size(), rank=group.rank(), group=group, layout=layout, communication=communication
    )


def boundaries_of(shard: ShardLayout) -> ShardBoundaries:
    return ShardBoundaries.of(Boundaries.from_lengths(LENGTHS), shard)


def sharded(
    heads: int, kv_heads: int, value_size: int, options: dict[str, Any], layout: str, communication: str
) -> list[Tensor]:
    """What ``whole`` returns, put together from the shards of all ranks."""
    shard = layout_of(layout, communication)
    q, k, v, grad = (x[shard.own] for x in tensors(heads, kv_heads, value_size))
    sinks = sinks_of(options, heads)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = varlen_attention(*inputs, boundaries_of(shard), **{**options, "sinks": sinks})
    out.backward(grad)
    results = [gather_pack(x, shard) for x in (out.detach(), *(x.grad for x in inputs))]
    if sinks is not None:
        dist.all_reduce(sinks.grad)
        results.append(sinks.grad)
    return results


def compare_all(
    heads: int, kv_heads: int, value_size: int, every: list[dict[str, Any]], one_in: int
) -> float:
    """Largest relative error over options and ways, all or one in so many."""
    worst = 0.0
    for options, (layout, communication) in list(product(every, WAYS))[::one_in]:
        expected = whole(heads, kv_heads, value_size, options)
        results = sharded(heads, kv_heads, value_size, options, layout, communication)
        for a, b in zip(results, expected, strict=True):
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
    """Outputs and gradients of all layouts and ways of communication are those of one process."""
    options = OPTIONS if heads == 4 else OPTIONS[:2]
    # fp64: sums of other ranks' parts in another order, nothing else.
    assert max(run_ranks(compare_all, cp, heads, kv_heads, value_size, options, one_in)) < 1e-13


REFUSED: list[tuple[str, int, dict[str, Any], str]] = [
    *((way, 4, AHEAD, f"'{way}' supports only.*'ulysses'") for way in ("all_gather", "needed", "ring")),
    ("ulysses", 3, AHEAD, "3 query heads.*multiple of 2"),
    ("ring", 4, {"backend": "te"}, "backend='te'.*needs_lse=True"),
]


def all_refusals() -> None:
    """Windows that look ahead, a backend whose results cannot be merged, and other numbers of slots."""
    q, k, v, _ = tensors(4, 2, 8)
    for communication, heads, options, message in REFUSED:
        shard = layout_of(communication=communication)
        rows = shard.own
        with pytest.raises(ValueError, match=message):
            varlen_attention(q[rows, :heads], k[rows, :1], v[rows, :1], boundaries_of(shard), **options)

    shard = layout_of("striped", "ring")
    inputs = [x[shard.own].requires_grad_() for x in tensors(4, 2, 8)[:3]]
    out = varlen_attention(*inputs, boundaries_of(shard), softcap=3.0)
    for result in (out, gather_pack(inputs[0], shard)):
        (grad,) = torch.autograd.grad(result.square().sum(), inputs[0], create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            grad.sum().backward()
    with pytest.raises(ValueError, match="rows, but the boundaries have .* slots. Pass the boundaries"):
        varlen_attention(q, k, v, boundaries_of(shard))


def test_refusals() -> None:
    """What shards cannot compute is refused on every rank alike; see ``all_refusals``."""
    run_ranks(all_refusals, 2)


def half_precision(communication: str, layout: str) -> float:
    """Error of bf16 shards against the pack in fp64, over that of the pack in bf16."""
    shard = layout_of(layout, communication)

    def run(dtype: torch.dtype, *, is_cut: bool) -> list[Tensor]:
        """Output and gradients of the whole pack, or of the shards of all ranks."""
        q, k, v, grad = (x.to(dtype) for x in tensors(4, 2, 8))
        rows = shard.own if is_cut else slice(None)
        inputs = [x[rows].requires_grad_() for x in (q, k, v)]
        boundaries = boundaries_of(shard) if is_cut else Boundaries.from_lengths(LENGTHS)
        out = varlen_attention(*inputs, boundaries)
        out.backward(grad[rows])
        results = [out.detach(), *(x.grad for x in inputs)]
        assert all(x.dtype == dtype for x in results)
        return [gather_pack(x, shard).double() if is_cut else x.double() for x in results]

    exact = run(torch.float64, is_cut=False)
    of_pack = run(torch.bfloat16, is_cut=False)
    of_shards = run(torch.bfloat16, is_cut=True)
    return max(
        float((a - c).norm()) / float((b - c).norm())
        for a, b, c in zip(of_shards, of_pack, exact, strict=True)
    )


@pytest.mark.parametrize(("layout", "communication"), [("striped", "needed")])
def test_parts_in_half_precision_are_merged_in_single(layout: str, communication: str) -> None:
    """Shards in bf16 are about as near to fp64 as the pack in bf16."""
    # Parts are rounded to bf16 before they are merged in fp32: as many roundings again as the pack has.
    assert max(run_ranks(half_precision, 2, communication, layout)) < 2.0


def exchanged_bytes() -> None:
    """Bytes received by an attention that is checkpointed, as ``traffic`` counts and as formulas say."""
    for layout, way in product(LAYOUTS, ("needed", "ring")):
        shard = layout_of(layout, way)
        inputs = [x[shard.own].requires_grad_() for x in tensors(4, 2, 8)[:3]]
        attend = partial(varlen_attention, *inputs, boundaries_of(shard))
        shard.traffic.read_and_reset()
        checkpoint(attend, use_reentrant=False).sum().backward()  # type: ignore[no-untyped-call]

        rank = dist.get_rank()
        counts = need_counts(LENGTHS, cp=dist.get_world_size(), layout=layout)
        # Keys arrive in both forward passes, and in a ring's backward; gradients of the keys that were sent.
        passes = 3 if way == "ring" else 2
        rows = passes * counts[rank].sum() + counts[:, rank].sum()
        row_bytes = 2 * 2 * 8 * 8  # keys and values, 2 heads of size 8, in fp64
        assert shard.traffic.read_and_reset().received_bytes == rows * row_bytes


def test_needed_exchange_receives_what_the_formula_says() -> None:
    """The counted traffic is the number of rows that ``need_counts`` gives; see ``exchanged_bytes``."""
    run_ranks(exchanged_bytes, 4)
