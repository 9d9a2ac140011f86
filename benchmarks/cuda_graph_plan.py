"""What CUDA graphs are expected to bring on a published distribution of sequences a pack, without a GPU.

``python -m benchmarks.cuda_graph_plan`` prints the planner's table for packs of which half hold 12 sequences
at most, nine of ten 43, 99 of 100 106 and the largest 358: coverage and expected speed-up of one, two and
three buckets, and of one of 2,048, with the assumed costs (``--quantiles`` for other packs). The costs are
measured in their place when the callback runs on a GPU.
"""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks.results import keep, less
from lightning_thd.cli.graph_plan import graph_plan
from lightning_thd.cuda_graph.choice.costs import lengths_from_quantiles

PUBLISHED = (12, 43, 106, 358)
COVERAGE = {64: 0.96, 106: 0.99}  # published beside the quantiles


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ("P50", "P90", "P99", "MAX")
    parser.add_argument("--quantiles", nargs=4, type=int, metavar=names, default=PUBLISHED)
    p50, p90, p99, largest = parser.parse_args(argv).quantiles
    plan = graph_plan(["--quantiles", *map(str, (p50, p90, p99, largest)), "--capacity", "8192"])
    print(plan.table())
    if (p50, p90, p99, largest) != PUBLISHED:
        return
    needs = lengths_from_quantiles({0.5: p50, 0.9: p90, 0.99: p99}, largest)
    for sequences, published in COVERAGE.items():
        share = float(np.mean(needs <= sequences))
        print(f"{sequences} sequences cover {share:.1%}, published about {published:.0%}")
        less(f"coverage of {sequences} sequences, off {published:.0%}", abs(share - published), "", 0.01)
    keep("expected speed-up of the chosen buckets", plan.chosen.speedup, "x", at_least=1.0)


if __name__ == "__main__":
    main()
