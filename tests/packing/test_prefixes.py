"""Groups of sequences that begin alike: each sequence once, distinct tokens below the capacity, any ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_thd import THDBatch, THDDataModule
from lightning_thd.batch.prefixes import SharedBoundaries
from lightning_thd.packing import Packs, Sequences
from lightning_thd.packing.prefixes import PrefixPlanner, group_prefixes
from tests.loss.test_prefixes import distinct
from tests.tiny import TinyModule, quiet_trainer

GROUPS = 12
SIZE = 4


def rows(seed: int = 0, *, answer: int = 4) -> list[dict[str, np.ndarray]]:
    """Draw a dataset of prompts with four answers each, in no order."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 60, int(rng.integers(3, 12))) for _ in range(GROUPS)]
    samples = [
        {"input_ids": np.concatenate([p, rng.integers(0, 60, int(rng.integers(1, answer + 1)))])}
        for p in prompts
        for _ in range(SIZE)
    ]
    return [samples[i] for i in rng.permutation(len(samples))]


def planner_of(data: list[dict[str, np.ndarray]], capacity: int, **settings: object) -> PrefixPlanner:
    lengths = [len(row["input_ids"]) for row in data]
    ids = [row["input_ids"].astype("<i4").tobytes() for row in data]
    return PrefixPlanner(lengths, capacity, ids=ids.__getitem__, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [Packs(4), Sequences(10)])
@pytest.mark.parametrize("capacity", [20, 64])
def test_every_sequence_once_and_distinct_tokens_fit(batch: Packs | Sequences, capacity: int) -> None:
    data = rows()
    planner = planner_of(data, capacity, global_batch=batch, loss_tokens="all")
    assert (planner.num_packs is None) == isinstance(batch, Sequences)

    for epoch in (0, 1):
        used = list[int]()
        for k in range(len(planner)):
            plans = [planner.step(epoch, k, dp) for dp in (1, 2)]
            held = [sorted(plan.spans.index.tolist()) for plan in plans]
            assert held[0] == held[1]
            assert plans[1].step == k
            for plan in plans:
                for members in (m for rank in plan.indices_by_rank() for m in rank if len(m)):
                    assert distinct([data[i] for i in members.tolist()]) <= capacity
                assert plan.loss_tokens == sum(len(data[i]["input_ids"]) - 1 for i in held[0])
            used += held[0]
            if isinstance(batch, Sequences) and k < len(planner) - 1:
                assert len(held[0]) == batch.n
        assert sorted(used) == list(range(len(data)))

    dropping = planner_of(data, capacity, global_batch=batch, tail="drop", seed=-1)
    ran = sum(dropping.step(1, k).sequences for k in range(len(dropping)))
    assert ran + dropping.tail_dropped(1) == len(data) > ran - (capacity > 20)


class Watched(TinyModule):
    """Notes the kind of every batch."""

    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        self.kinds = [*getattr(self, "kinds", []), type(batch.boundaries)]
        return super().training_step(batch, batch_idx)


def test_the_data_module_trains_the_same_loss() -> None:
    data = rows()
    runs = []
    for share in (False, True):
        module = Watched(torch.float64, lr=0.1)
        # All sequences are one step, so that both runs learn the same.
        source = THDDataModule(data, capacity=64, global_batch=Sequences(48), share_prefixes=share)
        quiet_trainer(max_epochs=2, strategy="thd").fit(module, source)
        runs.append(module)
    assert runs[1].outputs == pytest.approx(runs[0].outputs, rel=1e-6)
    assert SharedBoundaries in runs[1].kinds
    assert SharedBoundaries not in runs[0].kinds
    assert len(runs[1].kinds) < len(runs[0].kinds)  # fewer packs


def test_groups_hold_distinct_tokens_and_pairs_and_a_large_tree_repeats_its_prefix() -> None:
    data = rows()
    planner = planner_of(data, 64, global_batch=Sequences(48))
    plan = planner.step(0, 0, 2)
    cost = planner.cost
    packs = [[data[i] for i in pack.tolist()] for rank in plan.indices_by_rank() for pack in rank]
    stats = [THDBatch.collate(pack, share_prefixes=True).stats for pack in packs]
    work = sum(cost.linear * one.real_tokens + cost.quadratic * one.sum_squares for one in stats)
    # Strangers may begin with one token alike, which a pack shares and a plan does not count.
    assert work <= float(plan.work.sum()) == pytest.approx(work, rel=0.05)
    texts = [np.array([*range(10), 20 + i, 30], "<i4").tobytes() for i in range(9)]
    groups = group_prefixes(texts.__getitem__, 4, np.arange(9), 16, 0)
    assert np.diff(groups.offsets).tolist() == [3, 3, 3]
    assert groups.repeated == 1
    assert groups.shared.tolist() == [0, 10, 10] * 3


def test_what_does_not_go_with_shared_prefixes_is_refused() -> None:
    with pytest.raises(ValueError, match="share_prefixes=True with oversize='split': pieces"):
        planner_of(rows(), 64, global_batch=Packs(1), oversize="split")
    with pytest.raises(ValueError, match="share_prefixes=True does not work with schedule="):
        planner_of(rows(), 64, global_batch=Packs(1), schedule=[0])
    state = planner_of(rows(), 64, global_batch=Packs(1)).state(0, 0)
    with pytest.raises(ValueError, match="lengths was"):
        planner_of(rows(1), 64, global_batch=Packs(1)).resume(state)
    with pytest.raises(ValueError, match="share_prefixes=True with a stream"):
        THDDataModule(iter([{"input_ids": [1, 2]}]), capacity=8, share_prefixes=True)
