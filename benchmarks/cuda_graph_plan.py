"""What CUDA graphs are expected to bring on a published distribution of sequences a pack, without a GPU.

``python -m benchmarks.cuda_graph_plan`` prints the planner's table for packs of which half hold 12 sequences
at most, nine of ten 43, 99 of 100 106 and the largest 358: coverage and expected speed-up of one, two and
three buckets, and of one of 2,048, with the assumed costs (``--quantiles`` for other packs).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from statistics import NormalDist

import numpy as np

from benchmarks.results import keep, less
from lightning_thd.cuda_graph.buckets import BatchShape
from lightning_thd.cuda_graph.graph_choice import IntArray, plan_graphs

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
    needs = lengths_from_quantiles({0.5: p50, 0.9: p90, 0.99: p99}, largest)
    plan = plan_graphs([BatchShape(8192, n, 8192) for n in needs.tolist()], slots=8192, max_seqlen=8192)
    print(plan.table())
    if (p50, p90, p99, largest) != PUBLISHED:
        return
    for sequences, published in COVERAGE.items():
        share = float(np.mean(needs <= sequences))
        print(f"{sequences} sequences cover {share:.1%}, published about {published:.0%}")
        less(f"coverage of {sequences} sequences, off {published:.0%}", abs(share - published), "", 0.01)
    keep("expected speed-up of the chosen buckets", plan.chosen.speedup, "x", at_least=1.0)


def lengths_from_quantiles(quantiles: Mapping[float, int], largest: int, *, count: int = 10_000) -> IntArray:
    """Make ``[count]`` ascending lengths with given quantiles (share -> value), log-normal between.

    Numbers of sequences in a pack are near log-normal; straight lines through the logarithms over the normal
    quantiles hit what is published exactly and stay close between.
    """
    points = sorted(quantiles.items())
    normal = NormalDist()
    z = np.array([normal.inv_cdf(q) for q, _ in points])
    logs = np.log([value for _, value in points])
    shares = np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
    below = logs[0] + (shares - z[0]) * (logs[1] - logs[0]) / (z[1] - z[0])
    above = logs[-1] + (shares - z[-1]) * (logs[-1] - logs[-2]) / (z[-1] - z[-2])
    found = np.where(shares < z[0], below, np.where(shares > z[-1], above, np.interp(shares, z, logs)))
    values: IntArray = np.clip(np.ceil(np.exp(found) - 1e-9), 1, largest).astype(np.int64)
    values[-1] = largest
    return values


if __name__ == "__main__":
    main()
