"""Attention on a pack of 8,192 tokens, every way a CPU user has: ours, SDPA in three, flex attention.

``python -m benchmarks.attention`` prints wall and CPU milliseconds, medians of rounds in which all ways take
turns, for a forward and for both passes, in fp32 and bf16, and ours / peer beside the goals. What every path
of our kernel costs and how exact it is: ``benchmarks.attention_kernels``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from benchmarks.clock import Times, take_turns
from benchmarks.results import pair
from lightning_thd.attention import varlen_attention

TOKENS, HEADS, SIZE = 8192, 8, 64
# (documents, how their lengths are drawn, wanted speed-up over the dense mask)
SHAPES = (
    (16, "random", 8.0),
    (512, "random", 30.0),
    (16, "equal", 8.0),
    (64, "equal", 30.0),
    (512, "equal", 30.0),
    (128, "nearly equal", 30.0),
    (128, "nearly equal, as planned", 30.0),
)
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Seconds of one way to attend; None where there is no backward."""

    documents: int
    lengths: str
    way: str
    precision: str
    forward: Times
    both: Times | None

    @property
    def both_s(self) -> float | None:
        """Median wall seconds of forward and backward."""
        return self.both.wall_s if self.both else None


def draw_lengths(documents: int, kind: str) -> list[int]:
    """Cut TOKENS into documents: equally, within a tenth, or at uniformly drawn places (exponentially).

    As planned means longest first, as the planner lays the sequences of every pack.
    """
    if kind == "equal":
        return [TOKENS // documents] * documents
    if kind.startswith("nearly equal"):
        mean = TOKENS // documents
        steps = torch.randint(-(mean // 10), mean // 10 + 1, (documents // 2,), generator=_seeded(documents))
        lengths = [mean + s for step in steps.tolist() for s in (step, -step)]
        lengths[-1] += TOKENS - sum(lengths)
        return sorted(lengths, reverse=True) if kind.endswith("as planned") else lengths
    cuts = torch.randperm(TOKENS - 1, generator=_seeded(documents))[: documents - 1].sort().values + 1
    edges = [0, *cuts.tolist(), TOKENS]
    return [stop - start for start, stop in pairwise(edges)]


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ours(lengths: list[int]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """One call."""
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    longest = max(lengths)
    return lambda q, k, v: varlen_attention(q, k, v, cu, cu, longest, longest)


def sdpa_loop(lengths: list[int]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """One SDPA call a document."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(x.transpose(0, 1)[None].split(lengths, dim=2) for x in (q, k, v)), strict=True)
        outs = [scaled_dot_product_attention(*part, is_causal=True) for part in parts]
        return torch.cat(outs, dim=2)[0].transpose(0, 1)

    return run


def dense_mask(lengths: list[int]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """One SDPA call with a boolean [T, T] mask, made outside the timing."""
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
    """One compiled call; the block mask is made outside the timing."""
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


def prepare(
    lengths: list[int], way: str, dtype: torch.dtype = torch.float32
) -> tuple[Callable[[], object], Callable[[], object] | None]:
    """Make the inputs of one way and return its forward alone and its forward with backward."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn((TOKENS, HEADS, SIZE), generator=generator).to(dtype) for _ in range(4)]
    if way == "sdpa, padded batch":
        tensors = [pad_sequence(x.split(lengths), batch_first=True).transpose(1, 2) for x in tensors]
    *inputs, grad = tensors
    attend = WAYS[way](lengths)

    def forward() -> object:
        with torch.no_grad():
            return attend(*inputs)

    if way == "flex attention, compiled":  # it has no backward on CPUs
        return forward, None
    leaves = [x.detach().requires_grad_() for x in inputs]
    return forward, lambda: torch.autograd.grad(attend(*leaves), leaves, grad)


def ways_of(kind: str, dtype: torch.dtype, wanted: list[str]) -> list[str]:
    """Choose the ways worth their time: the mask and flex only in fp32 on random lengths."""
    slow = ("sdpa, dense mask", "flex attention, compiled")
    whole = kind == "random" and dtype == torch.float32
    return [way for way in wanted if whole or way not in slow]


def measure(
    documents: int, kind: str, ways: list[str], *, rounds: int, dtype: torch.dtype = torch.float32
) -> list[Row]:
    """Time every way once a round, all ways in turn."""
    runs: dict[str, Callable[[], object]] = {}
    for way in ways:
        forward, both = prepare(draw_lengths(documents, kind), way, dtype)
        runs[f"{way}/forward"] = forward
        if both is not None:
            runs[f"{way}/both"] = both
    slow = {name: min(rounds, 2) for name in runs if name.startswith("sdpa, dense mask")}  # seconds a run
    found = take_turns(runs, rounds, most=slow)
    precision = NAMES[dtype]
    return [
        Row(
            documents=documents,
            lengths=kind,
            way=way,
            precision=precision,
            forward=found[f"{way}/forward"],
            both=found.get(f"{way}/both"),
        )
        for way in ways
    ]


def main(argv: list[str] | None = None) -> list[Row]:
    """Measure, print and return all rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--threads", type=int, help="1 makes CPU time telling on a machine shared with others"
    )
    parser.add_argument("--json", help="file to write the rows to")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, T={TOKENS}, {HEADS} heads of {SIZE}"
    )
    rows = []
    for dtype in NAMES:
        for documents, kind, wanted in SHAPES:
            ways = ways_of(kind, dtype, args.ways)
            here = measure(documents, kind, ways, rounds=args.rounds, dtype=dtype)
            rows += here
            longest = max(draw_lengths(documents, kind))
            print(f"\n{documents} documents, {kind} lengths (longest {longest}), {NAMES[dtype]}")
            heads = ("forward ms", "CPU ms", "fwd+bwd ms", "CPU ms")
            print(f"{'':26s}" + "".join(f"{head:>12s}" for head in heads) + f"{'peer / ours':>13s}  goal")
            for row in here:
                print(line(row, here[0], wanted), flush=True)
            keep(here, f"{documents} {kind} documents", wanted)
    if args.json:
        with open(args.json, "w") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)
    return rows


def keep(rows: list[Row], shape: str, dense: float) -> None:
    """Record the goals: as fast as the fastest peer, and so many times the dense mask."""
    mine, *peers = rows
    both = [row for row in peers if row.both]
    if mine.both is None or not both:
        return
    best = min(both, key=lambda row: row.both_s or 0.0)
    assert best.both is not None
    pair(f"{shape}, forward and backward, {best.way}", mine.both, best.both, 1.0, precision=mine.precision)
    quick = min(peers, key=lambda row: row.forward.wall_s)
    pair(f"{shape}, forward, {quick.way}", mine.forward, quick.forward, 1.0, precision=mine.precision)
    for row in both:
        if row.way == "sdpa, dense mask" and row.both:
            pair(f"{shape}, dense mask", mine.both, row.both, dense, precision=mine.precision)


def line(row: Row, mine: Row, wanted: float) -> str:
    """Format one row; the ratio is of forward and backward, or of the forwards where there is no backward."""
    ratio = mine.both.times(row.both) if row.both and mine.both else mine.forward.times(row.forward)
    goal = "" if row is mine else f">= {wanted:.0f}" if row.way == "sdpa, dense mask" else ">= 1"
    cells = "".join(
        f"{1e3 * x.wall_s:12.1f}{1e3 * x.cpu_s:12.1f}" if x else f"{'-':>12s}{'-':>12s}"
        for x in (row.forward, row.both)
    )
    return f"{row.way:26s}{cells}{ratio:13.2f}  {goal}"


if __name__ == "__main__":
    main()
