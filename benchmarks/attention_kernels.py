"""Every path of the CPU attention kernel, by dtype: CPU time of both passes, and error against fp64.

``python -m benchmarks.attention_kernels`` runs documents of 200 to 500 tokens, one thread, and prints CPU
milliseconds (medians of rounds in which the dtypes take turns) and the error of the output and of dq, dk and
dv, as a share of the exact one's norm. Exact is whole scores in fp64, one document after the other, from the
same rounded inputs. Where torch's own attention computes the same (no window, softcap or sink) its errors in
bf16 stand beside: the goal is that ours are not above them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.clock import take_turns
from benchmarks.results import less
from lightning_thd.attention import varlen_attention

LENGTHS = (500, 200, 350, 410, 230, 358)
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# Rounding of the stored result itself is the same for both.
SLACK = 1.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Path:
    """One path: heads, sizes and options."""

    heads: int = 8
    kv_heads: int = 8
    size: int = 64
    value_size: int = 64
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def plain(self) -> bool:
        """Whether torch's own attention computes the same."""
        alike = self.size == self.value_size
        return alike and self.window is None and self.softcap is None and not self.sinks


PATHS = {
    "causal": Path(),
    "both ways": Path(causal=False),
    "window 128": Path(window=128),
    "softcap 30": Path(softcap=30.0),
    "softcap 30, window 128": Path(softcap=30.0, window=128),
    "sinks": Path(sinks=True),
    "8 heads on 2": Path(kv_heads=2),
    "8 heads on 1": Path(kv_heads=1),
    "head size 32": Path(size=32, value_size=32),
    "head size 96": Path(size=96, value_size=96),
    "head size 128": Path(size=128, value_size=128),
    "head size 256": Path(heads=4, kv_heads=4, size=256, value_size=256),
    "sizes 192 and 128": Path(size=192, value_size=128),
}


def inputs(path: Path) -> list[Tensor]:
    """Draw q, k, v, the gradient of the output and the sinks, in fp64 but rounded to bf16."""
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    shapes = [
        (total, path.heads, path.size),
        (total, path.kv_heads, path.size),
        (total, path.kv_heads, path.value_size),
        (total, path.heads, path.value_size),
        (path.heads,),
    ]
    # values that every dtype holds exactly, so that all of them get the same problem
    return [torch.randn(shape, generator=generator).bfloat16().double() for shape in shapes]


def exact(path: Path, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """Attend with whole scores, one document after the other."""
    groups, found = path.heads // path.kv_heads, []
    edges = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    for start, stop in pairwise(edges):
        rows = slice(start, stop)
        keys, values = (x[rows].repeat_interleave(groups, 1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q[rows], keys) * path.size**-0.5
        if path.softcap:
            scores = path.softcap * torch.tanh(scores / path.softcap)
        i, j = torch.arange(stop - start)[:, None], torch.arange(stop - start)[None]
        hidden = torch.zeros_like(i - j, dtype=torch.bool)
        if path.causal:
            hidden |= j > i
        if path.window is not None:
            hidden |= j <= i - path.window
        scores = scores.masked_fill(hidden, -torch.inf)
        if path.sinks:
            one = sinks[:, None, None].expand(-1, stop - start, 1)
            scores = torch.cat([scores, one], dim=2)
            weights = scores.softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        found.append(torch.einsum("hij,jhe->ihe", weights, values))
    return torch.cat(found)


def ours(path: Path, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """One call."""
    cu = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    longest = max(LENGTHS)
    return varlen_attention(
        q,
        k,
        v,
        cu,
        cu,
        longest,
        longest,
        causal=path.causal,
        window=path.window,
        softcap=path.softcap,
        sinks=sinks if path.sinks else None,
        backend="cpu",
    )


def torchs(path: Path, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """Torch's own attention, a call a document."""
    groups = path.heads // path.kv_heads
    parts = zip(*(x.transpose(0, 1)[None].split(LENGTHS, dim=2) for x in (q, k, v)), strict=True)
    outs = [
        scaled_dot_product_attention(
            a, b.repeat_interleave(groups, 1), c.repeat_interleave(groups, 1), is_causal=path.causal
        )
        for a, b, c in parts
    ]
    return torch.cat(outs, dim=2)[0].transpose(0, 1)


Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def both(attend: Attend, given: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of q, k and v."""
    leaves = [x.to(dtype).requires_grad_() for x in given[:3]]
    out = attend(*leaves, given[4].to(dtype))
    return [out.detach(), *torch.autograd.grad(out, leaves, given[3].to(dtype))]


def errors(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    """Relative errors of the four, each in the norm."""
    pairs = zip(found, wanted, strict=True)
    return [((x.double() - y).norm() / y.norm()).item() for x, y in pairs]


def measure(name: str, path: Path, rounds: int) -> None:
    """Print the rows of a path and record its goals."""
    given = inputs(path)
    wanted = both(partial(exact, path), given, torch.float64)
    runs: dict[str, Callable[[], object]] = {}
    for dtype, word in DTYPES.items():
        attend = partial(ours, path)
        q, k, v, sinks = (x.to(dtype) for x in (*given[:3], given[4]))
        runs[f"{word} forward"] = partial(_forward, attend, q, k, v, sinks)
        runs[f"{word} both"] = partial(both, attend, given, dtype)
    times = take_turns(runs, rounds)
    for dtype, word in DTYPES.items():
        mine = errors(both(partial(ours, path), given, dtype), wanted)
        forward, whole = times[f"{word} forward"].cpu_s, times[f"{word} both"].cpu_s
        cells = "".join(f"{error:10.1e}" for error in mine)
        print(f"{name:26}{word:6}{1e3 * forward:11.1f}{1e3 * (whole - forward):11.1f}{cells}", end="")
        if dtype == torch.bfloat16 and path.plain:
            theirs = errors(both(partial(torchs, path), given, dtype), wanted)
            print("   torch's" + "".join(f"{error:10.1e}" for error in theirs), end="")
            for part, error, other in zip(("out", "dq", "dk", "dv"), mine, theirs, strict=True):
                less(f"error of {part}, {name}", error, "", SLACK * other, peer=other, precision=word)
        if dtype == torch.float32:
            less(f"largest error of out, dq, dk, dv, {name}", max(mine), "", 1e-5, precision=word)
        print(flush=True)


def _forward(attend: Attend, *given: Tensor) -> Tensor:
    with torch.no_grad():
        return attend(*given)


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    print(f"{len(LENGTHS)} documents, {sum(LENGTHS):,} tokens, one thread; errors against fp64")
    heads = "".join(f"{head:>10}" for head in ("out", "dq", "dk", "dv"))
    print(f"{'path':26}{'':6}{'fwd CPU ms':>11}{'bwd CPU ms':>11}{heads}")
    for name, path in PATHS.items():
        measure(name, path, args.rounds)
    torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
