"""The bound that the balance benchmark prints, against trying every plan."""

import itertools

import numpy as np

from benchmarks.balance import bound, karmarkar_karp
from lightning_thd.packing import Cost

COST = Cost(linear=20, quadratic=1)


def best_by_trying(lengths: list[int], capacity: int, dp: int, microbatches: int) -> float:
    """Least work waited for over every assignment to dp x microbatches bins, of an even share."""
    sizes, work = np.array(lengths), COST(lengths)
    best = np.inf
    for owner in itertools.product(range(dp * microbatches), repeat=len(lengths)):
        if np.bincount(owner, weights=sizes).max() <= capacity:
            totals = np.sort(np.bincount(owner, weights=work, minlength=dp * microbatches))[::-1]
            best = min(best, totals[::dp].sum())
    return float(best * dp / work.sum())


def test_no_plan_is_below_the_bound() -> None:
    tight = 0
    for seed in range(5):
        lengths = np.random.default_rng(seed).integers(1, 11, 6)
        least = bound(lengths, 10, 2, COST)
        best = min(best_by_trying(lengths.tolist(), 10, 2, microbatches) for microbatches in (1, 2, 3))
        if np.isfinite(best):
            assert least <= best + 1e-12
            tight += best / least < 1.05
    assert tight >= 1  # it is near enough to be of use


def test_the_peers_partition_uses_everything_once() -> None:
    parts = karmarkar_karp(np.random.default_rng(0).random(40), 4)
    assert sorted(i for part in parts for i in part) == list(range(40))
