"""Work of context-parallel ranks on the same packs: dual-chunk shards beside contiguous ones.

``python -m benchmarks.context_balance`` prints, for 20 packs of each distribution and size, the heaviest
rank's share of an even one: of the work a * s + b * s^2 of Llama-3.1-8B by our FlopsModel (s slots, s^2
causal pairs), and of the attention's pairs alone. Mean over the packs, and the worst. Goal: the worst work of
dual-chunk shards is at most 1.05.

Packs are best-fit decreasing (bfd), whose sequences are of like lengths, or filled in the order of arrival
(next_fit), whose are not. Each sequence and the pack are padded as the layout asks. No collective runs.

A second table has all layouts: the keys that ranks receive by "needed" over those of an all-gather, and the
heaviest rank's share of attention's pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from benchmarks import results
from benchmarks.balance import LLAMA_8B
from lightning_thd.alignment import Alignment, Layout
from lightning_thd.flops import FlopsModel
from lightning_thd.packing import Cost, pack_lengths
from lightning_thd.parallel.context.needs import need_counts
from lightning_thd.parallel.context.partition import causal_work

Algorithm: TypeAlias = Literal["bfd", "next_fit"]
Algorithm: TypeAlias = Literal["bfd", "next_fit"]
PACKS, GOAL = 20, 1.05
# Mean, sigma and bounds of lognormal lengths: those of the Megatron mock data set, chats, and documents.
SHAPES = {
    "long": (4096, 1.1, 1024, 8192),
    "chat": (600, 1.0, 16, 4096),
    "documents": (8192, 1.0, 16, 131_072),
}
COLUMNS = (
    *((shape, 32_768, cp) for shape in ("chat", "long") for cp in (2, 4, 8)),
    ("documents", 131_072, 8),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """The heaviest rank's share of an even one.

    Attributes:
        work: of a * s + b * s^2, mean over the packs.
        worst: the worst of them.
        pairs: of attention alone, mean over the packs.
    """

    work: float
    worst: float
    pairs: float


def draw_packs(shape: str, capacity: int, algorithm: Algorithm, align: Alignment) -> list[list[int]]:
    """Padded lengths of 20 packs, the trailing pad of each included."""
    mean, sigma, low, high = SHAPES[shape]
    rng = np.random.default_rng(0)
    count = 3 * PACKS * capacity // mean  # more than enough for as many packs
    drawn = np.clip(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count), low, high).astype(np.int64)
    padded = align.padded_lengths(drawn[align.padded_lengths(drawn) <= capacity])
    packs = list(pack_lengths(padded, capacity, algorithm=algorithm))
    chosen = rng.choice(len(packs), PACKS, replace=False)
    return [with_pad(padded[packs[i]], align) for i in chosen]


def with_pad(padded: npt.NDArray[np.int64], align: Alignment) -> list[int]:
    """The lengths, and the pad at the end if there is one."""
    total = int(padded.sum())
    pad = align.padded_total(total) - total
    return [*padded.tolist(), *([pad] if pad else [])]


def measure(shape: str, capacity: int, cp: int, algorithm: Algorithm, layout: Layout) -> Balance:
    """The balance of one layout on one column."""
    cost = Cost.from_flops(FlopsModel.from_config(LLAMA_8B))
    work, pairs = [], []
    for lengths in draw_packs(shape, capacity, algorithm, Alignment.for_(cp=cp, layout=layout)):
        # Cost counts s^2 of a causal sequence; one pair is half of that.
        of_ranks = causal_work(
            lengths, cp=cp, layout=layout, per_slot=cost.linear, per_pair=2 * cost.quadratic
        )
        alone = causal_work(lengths, cp=cp, layout=layout)
        work.append(of_ranks.max() / of_ranks.mean())
        pairs.append(alone.max() / alone.mean())
    return Balance(work=float(np.mean(work)), worst=max(work), pairs=float(np.mean(pairs)))


def keys_received(shape: str, capacity: int, cp: int, layout: Layout) -> float:
    """The keys that all ranks receive of each other by "needed", over those of an all-gather, as a mean."""
    packs = draw_packs(shape, capacity, "bfd", Alignment.for_(cp=cp, layout=layout))
    needed = [need_counts(lengths, cp=cp, layout=layout).sum() for lengths in packs]
    return float(np.mean([n / ((cp - 1) * sum(pack)) for n, pack in zip(needed, packs, strict=True)]))


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    print(f"{PACKS} packs each; max / mean over ranks: work, its worst pack, attention pairs alone")
    print(f"{'column':<32}{'dual-chunk':>26}{'contiguous':>26}  goal {GOAL}")
    for (shape, capacity, cp), algorithm in product(COLUMNS, get_args(Algorithm)):
        dual, contiguous = (
            measure(shape, capacity, cp, algorithm, at) for at in ("dual_chunk", "contiguous")
        )
        name = f"{shape} {capacity // 1024}k cp {cp}, {algorithm}"
        kept = results.less(f"dual-chunk work, max / mean, {name}", dual.worst, "", GOAL)
        figures = "".join(
            f"{found.work:>10.3f}{found.worst:>8.3f}{found.pairs:>8.3f}" for found in (dual, contiguous)
        )
        print(name.ljust(32) + figures + ("  met" if kept.met else "  MISSED"))
    print("\nkeys received by needed / by all_gather, and attention pairs of the heaviest rank / mean; bfd")
    for (shape, capacity, cp), layout in product(COLUMNS, get_args(Layout)):
        pairs = measure(shape, capacity, cp, "bfd", layout).pairs
        name = f"{shape} {capacity // 1024}k cp {cp}, {layout}"
        print(f"{name:<32}{keys_received(shape, capacity, cp, layout):>10.3f}{pairs:>8.3f}")


if __name__ == "__main__":
    main()
