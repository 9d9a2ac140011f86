"""Random mixtures -> every sequence exactly as often as the mixture says, on any ranks, workers and restarts.

``python -m tests.trust.mixtures [--planner 10000] [--loader 300]`` ends in a table of
``benchmarks/TRUST.md``. The oracle counts one by one and shares no code with the planner: what an epoch takes
of a source is its share rounded down or up, and after any number of epochs no sequence of a source was used
more than once more than another of it.
"""

from __future__ import annotations

import argparse
import logging
import random
import resource
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lightning_thd import Packs, Sequences, THDDataModule
from lightning_thd.data.loader import THDLoader
from lightning_thd.packing.mixtures import Mixing, MixturePlanner, make_mixture
from tests.trust.record import record

_EPOCHS = 3


def exact_counts(sizes: Mapping[str, int], weights: Mapping[str, float], mixing: Mixing) -> dict[str, float]:
    """Say what an epoch would take of sources of these sizes if sequences could be cut."""
    if mixing.passes is not None:
        return {name: float(sizes[name] * mixing.passes[name]) for name in sizes}
    raised = {name: weight ** (1 / mixing.temperature) for name, weight in weights.items()}
    shares = {name: value / sum(raised.values()) for name, value in raised.items()}
    wanted = [sizes[name] / shares[name] for name in sizes]
    sized = {"longest": max(wanted), "shortest": min(wanted)}
    number = round(sized[mixing.epoch]) if isinstance(mixing.epoch, str) else mixing.epoch
    return {name: share * number for name, share in shares.items()}


@dataclass
class Case:
    """A random mixture: its sources, weights and how an epoch is made of them."""

    rng: random.Random
    lengths: dict[str, list[int]] = field(init=False)
    weights: dict[str, float] = field(init=False)
    mixing: Mixing = field(init=False)

    def __post_init__(self) -> None:
        rng = self.rng
        self.capacity = rng.choice([16, 64, 200])
        names = [f"s{k}" for k in range(rng.randint(1, 4))]
        longest = rng.randint(1, self.capacity)
        self.lengths = {name: [rng.randint(1, longest) for _ in range(rng.randint(1, 30))] for name in names}
        self.weights = {name: rng.choice([1.0, rng.random() + 0.05]) for name in names}
        sizes = {name: len(rows) for name, rows in self.lengths.items()}
        kinds: list[Mixing] = [
            Mixing(),
            Mixing(temperature=rng.choice([0.7, 2.0, 10.0])),
            Mixing(epoch="shortest" if self._each_once(sizes) else "longest"),
            Mixing(epoch=rng.randint(20 * len(names), 100)),
            Mixing(passes={name: rng.choice([0.5, 1, 2, 1.3]) for name in names}),
        ]
        self.mixing = rng.choice(kinds)
        self.step: Packs | Sequences = rng.choice([Packs(4), Sequences(rng.randint(1, 16))])
        self.seed = rng.randrange(2**32)
        self.window = rng.choice([1, 4, 64])

    def _each_once(self, sizes: dict[str, int]) -> bool:
        """Say whether the shortest epoch has a sequence of every source."""
        total = sum(self.weights.values())
        number = min(sizes[name] * total / self.weights[name] for name in sizes)
        return all(number * self.weights[name] / total >= 1 for name in sizes)

    def exact_counts(self) -> dict[str, float]:
        """Say what an epoch would take of each source if sequences could be cut."""
        sizes = {name: len(rows) for name, rows in self.lengths.items()}
        return exact_counts(sizes, self.weights, self.mixing)

    def planner(self) -> MixturePlanner:
        arrays = {name: np.array(rows) for name, rows in self.lengths.items()}
        mixture = make_mixture(arrays, self.weights, self.mixing, seed=self.seed)
        lengths = np.concatenate(list(arrays.values()))
        settings = {"global_batch": self.step, "window": self.window, "seed": self.seed}
        return MixturePlanner(lengths, self.capacity, mixture=mixture, **settings)

    def names(self) -> list[tuple[str, int]]:
        """Of every dataset index, the source and the row."""
        return [(name, row) for name, rows in self.lengths.items() for row in range(len(rows))]

    def check_epochs(self, epochs: list[list[int]]) -> None:
        """Hold the sequences used in some epochs against the oracle."""
        names, total = self.names(), Counter[int]()
        exact = self.exact_counts()
        for used in epochs:
            by_source = Counter(names[i][0] for i in used)
            for name, wanted in exact.items():
                assert abs(by_source[name] - wanted) < 1 + 1e-9, (by_source, exact)
            total.update(used)
            for name, rows in self.lengths.items():
                counts = [total[i] for i, (source, _) in enumerate(names) if source == name]
                assert len(counts) == len(rows)
                assert max(counts) - min(counts) <= 1, (name, counts)


def planner_case(number: int) -> int:
    """Plan some epochs of a random mixture on two numbers of ranks, and from a state in the middle."""
    case = Case(random.Random(f"planner {number}"))
    one, other = case.planner(), case.planner()
    rng, epochs, steps = case.rng, [], 0
    dp = rng.choice([1, 2, 4])
    at = rng.randrange(_EPOCHS), rng.random()
    for epoch in range(_EPOCHS):
        plans = [one.step(epoch, k, 1) for k in range(one.num_steps(epoch))]
        epochs.append([int(i) for plan in plans for i in plan.spans.index])
        steps += len(plans)
        if epoch == at[0]:
            first = int(at[1] * len(plans))
            assert other.resume(one.state(epoch, first)) == (epoch, first)
            for k in range(first, len(plans)):
                found = other.step(epoch, k, dp)
                ranks = [i for rank in found.indices_by_rank() for pack in rank for i in pack.tolist()]
                assert sorted(ranks) == sorted(plans[k].spans.index.tolist())
                assert len({len(rank) for rank in found.indices_by_rank()}) == 1
    case.check_epochs(epochs)
    return steps


def _rows(case: Case) -> dict[str, list[dict[str, Any]]]:
    """Give every sequence ids that no other has: its number in the dataset, then the places of its tokens."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in case.lengths}
    for i, (name, row) in enumerate(case.names()):
        ids = [1000 + i, *range(case.lengths[name][row] - 1)]
        found[name].append({"input_ids": np.array(ids)})
    return found


def _loader(case: Case, *, dp: int = 1, rank: int = 0, workers: int = 0) -> THDLoader:
    rows = _rows(case)
    data = THDDataModule(
        {name: (rows[name], case.weights[name]) for name in rows},
        capacity=case.capacity,
        global_batch=case.step,
        mixing=case.mixing,
        window=case.window,
        seed=case.seed,
        num_workers=workers,
    )
    accumulate = case.step.n // dp if isinstance(case.step, Packs) else 1
    data.attach(rank=rank, ranks=dp, accumulate=accumulate)
    data.setup("fit")
    loader = data.train_steps()
    assert isinstance(loader, THDLoader)
    return loader


Step = list[tuple[int, ...]]  # ids of the sequences of a step, in any order


def _read(loader: THDLoader, steps: int | None = None) -> list[Step]:
    """Read the rest of an epoch, or some steps of it: the tokens, not what the batch says they are."""
    found: list[Step] = []
    for step in loader:
        rows = [row for batch in step.microbatches for row in batch.unpack(batch.input_ids)]
        found.append([tuple(row.tolist()) for row in rows])
        if len(found) == steps:
            break
    return found


def loader_case(number: int) -> int:
    """Read a random mixture whole, then in part, and go on with other ranks and workers."""
    case = Case(random.Random(f"loader {number}"))
    rng = case.rng
    rows = _rows(case)
    whole_rows = {tuple(row["input_ids"].tolist()) for part in rows.values() for row in part}
    loader = _loader(case, workers=rng.choice([0, 0, 1]))
    epochs = [_read(loader) for _ in range(2)]
    for epoch in epochs:
        assert {row for step in epoch for row in step} <= whole_rows
    case.check_epochs([[row[0] - 1000 for step in epoch for row in step] for epoch in epochs])
    first = _loader(case, workers=rng.choice([0, 2]))
    at, stop = rng.randrange(2), rng.random()
    for _ in range(at):
        _read(first)
    done = max(1, int(stop * len(epochs[at])))
    state = None
    for k, _ in enumerate(first, 1):
        if k == done:
            state = first.state_dict()
            break
    assert state is not None
    dp, workers = rng.choice([1, 2, 4]), rng.choice([0, 0, 1, 2])
    parts = []
    for rank in range(dp):
        resumed = _loader(case, dp=dp, rank=rank, workers=workers)
        resumed.load_state_dict(state)
        rest = at, done
        if done == len(epochs[at]):
            rest = at + 1, 0
            if at + 1 == len(epochs):
                return len(epochs[0])
        parts.append(_read(resumed))
    wanted = [sorted(step) for step in epochs[rest[0]][rest[1] :]]
    found = [sorted(row for part in ranks for row in part) for ranks in zip(*parts, strict=True)]
    assert found == wanted
    return len(epochs[0]) + len(wanted)


def _cpu_s() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


def main() -> None:
    """Run all cases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--planner", type=int, default=10_000, help="cases of the planner alone")
    parser.add_argument("--loader", type=int, default=300, help="cases of loaders with workers and restarts")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    rows: dict[str, object] = {}
    for name, count, run in (
        ("planner", given.planner, planner_case),
        ("loader", given.loader, loader_case),
    ):
        began, steps = _cpu_s(), 0
        for case in range(count):
            try:
                steps += run(case)
            except Exception as err:
                raise AssertionError(f"case {case} of the {name} went wrong") from err
        rows[f"{name}: cases, wrong"] = f"{count:,}, 0"
        rows[f"{name}: steps held against the oracle"] = f"{steps:,}"
        rows[f"{name}: CPU seconds"] = f"{_cpu_s() - began:.0f}"
    rows["shares of sources"] = "within one sequence of the weights in every epoch"
    rows["resumed in the middle"] = "every case, on 1, 2 or 4 ranks, with 0, 1 or 2 workers"
    record("mixtures", rows)


if __name__ == "__main__":
    main()
