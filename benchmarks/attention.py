"""Attention on a pack of 8,192 tokens, every way a CPU user has: ours, SDPA looped, masked, padded, flex attention.

``python -m benchmarks.attention`` prints milliseconds for a forward and a backward, and ours / peer beside the goals.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from lightning_thd.attention import varlen_attention

TOKENS, HEADS, SIZE = 8192, 8, 64
# (documents, how their lengths are drawn, wanted speed-up over the dense mask)
SHAPES = ((16, "random", 8.0), (512, "random", 30.0), (16, "equal", 8.0), (512, "equal", 30.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Best times of one way to attend, in milliseconds; None where there is no backward."""

    documents: int
    lengths: str
    way: str
    forward_ms: float
    both_ms: float | None


def draw_lengths(documents: int, kind: str) -> list[int]:
    """Cut TOKENS into documents: equally, or at uniformly drawn places (nearly exponential lengths)."""
    if kind == "equal":
        return [TOKENS // documents] * documents
    generator = torch.Generator().manual_seed(documents)
    cuts = torch.randperm(TOKENS - 1, generator=generator)[: documents - 1].sort().values + 1
    edges = [0, *cuts.tolist(), TOKENS]
    return [stop - start for start, stop in zip(edges, edges[1:], strict=False)]


def ours(lengths: list[int]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    longest = max(lengths)
    return lambda q, k, v: varlen_attention(q, k, v, cu, cu, longest, longest)


def sdpa_loop(lengths: list[int]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(x.transpose(0, 1)[None].split(lengths, dim=2) for x in (q, k, v)), strict=True)
        outs = [scaled_dot_product_attention(*part, is_causal=True) for part in parts]
        return torch.cat(outs, dim=2)[0].transpose(0, 1)

    return run


def dense_mask(lengths: list[int]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    ids = torch.repeat_interleave(torch.tensor(lengths))
    mask = (ids[:, None] == ids[None]).tril_()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)

    return run


def padded_batch(lengths: list[int]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The model that pads keeps its rows padded all along: neither padding nor unpadding is timed."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    return run


def flex(lengths: list[int]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    ids = torch.repeat_interleave(torch.tensor(lengths))
    block_mask = create_block_mask(
        lambda b, h, i, j: (i >= j) & (ids[i] == ids[j]), 1, 1, TOKENS, TOKENS, device="cpu"
    )
    compiled = torch.compile(flex_attention)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return compiled(q, k, v, block_mask=block_mask)[0].transpose(0, 1)

    return run


WAYS = {
    "ours": ours,
    "sdpa in a loop": sdpa_loop,
    "sdpa, padded batch": padded_batch,
    "sdpa, dense mask": dense_mask,
    "flex attention, compiled": flex,
}


def best_ms(run: Callable[[], object], *, seconds: float) -> float:
    """Fastest of the runs that fit in ``seconds``, after one to warm up."""
    run()
    best, spent = float("inf"), 0.0
    while spent < seconds or best == float("inf"):
        start = time.perf_counter()
        run()
        took = time.perf_counter() - start
        best, spent = min(best, took), spent + took
    return best * 1e3


def measure(documents: int, kind: str, way: str, *, seconds: float) -> Row:
    lengths = draw_lengths(documents, kind)
    generator = torch.Generator().manual_seed(0)
    shape = (TOKENS, HEADS, SIZE)
    tensors = [torch.randn(shape, generator=generator) for _ in range(4)]
    if way == "sdpa, padded batch":
        longest = max(lengths)
        padded = [
            torch.stack([pad(part, (0, 0, 0, 0, 0, longest - len(part))) for part in x.split(lengths)])
            for x in tensors
        ]
        tensors = [x.transpose(1, 2) for x in padded]
    *inputs, grad = tensors
    attend = WAYS[way](lengths)
    with torch.no_grad():
        forward_ms = best_ms(lambda: attend(*inputs), seconds=seconds)
    both_ms = None
    if way != "flex attention, compiled":  # it has no backward on CPUs
        leaves = [x.detach().requires_grad_() for x in inputs]
        both_ms = best_ms(lambda: torch.autograd.grad(attend(*leaves), leaves, grad), seconds=seconds)
    return Row(documents=documents, lengths=kind, way=way, forward_ms=forward_ms, both_ms=both_ms)


def main(argv: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--seconds", type=float, default=1.5, help="to repeat each measurement for")
    parser.add_argument("--json", help="file to write the rows to")
    args = parser.parse_args(argv)
    rows = []
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, T={TOKENS}, {HEADS} heads of {SIZE}, fp32"
    )
    for documents, kind, wanted in SHAPES:
        here = [measure(documents, kind, way, seconds=args.seconds) for way in args.ways]
        rows += here
        print(f"\n{documents} documents, {kind} lengths (longest {max(draw_lengths(documents, kind))})")
        print(f"{'':26s}{'forward ms':>12s}{'fwd+bwd ms':>12s}{'peer / ours':>13s}  goal")
        mine = here[0]
        for row in here:
            ratio = (
                row.both_ms / mine.both_ms
                if row.both_ms and mine.both_ms
                else row.forward_ms / mine.forward_ms
            )
            goal = "" if row is mine else f">= {wanted:.0f}" if row.way == "sdpa, dense mask" else ">= 1"
            both = f"{row.both_ms:12.1f}" if row.both_ms else f"{'-':>12s}"
            print(f"{row.way:26s}{row.forward_ms:12.1f}{both}{ratio:13.2f}  {goal}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)
    return rows


if __name__ == "__main__":
    main()
