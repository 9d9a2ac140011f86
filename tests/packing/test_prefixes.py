"""Groups of sequences that begin alike: each sequence once, distinct tokens below the capacity, any ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_thd import THDBatch, THDDataModule
from lightning_thd.batch.prefixes import SharedBatch
from lightning_thd.packing import Packs, Sequences
from lightning_thd.packing.prefixes import PrefixPlanner, group_prefixes
from tests.loss.test_prefixes import distinct
from tests.tiny import TinyModule, quiet_trainer

GROUPS, SIZE = 12, 4


def rows(seed: int = 0, *, answer: int = 4) -> list[dict[str, np.ndarray]]:
    """Draw a dataset of prompts with four answers each, in no order."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 60, int(rng.integers(3, 12))) for _ in range(GROUPS)]
    found = [
        {"input_ids": np.concatenate([p, rng.integers(0, 60, int(rng.integers(1, answer + 1)))])}
        for p in prompts
        for _ in range(SIZE)
    ]
    return [found[i] for i in rng.permutation(len(found))]


def planner_of(data: list[dict[str, np.ndarray]], capacity: int, **settings: object) -> PrefixPlanner:
    lengths = [len(row["input_ids"]) for row in data]
    ids = [row["input_ids"].astype("<i4").tobytes() for row in data]
    return PrefixPlanner(lengths, capacity, ids=ids.__getitem__, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [Packs(2), Sequences(10)])
@pytest.mark.parametrize("capacity", [20, 64])
def test_every_sequence_once_and_distinct_tokens_fit(batch: Packs | Sequences, capacity: int) -> None:
    data = rows()
    planner = planner_of(data, capacity, global_batch=batch, loss_tokens="all")
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


def test_a_killed_job_goes_on_with_the_same_sequences_on_other_ranks() -> None:
    settings = {"global_batch": Sequences(10), "loss_tokens": "all", "seed": 3}
    first, again = (planner_of(rows(), 64, **settings) for _ in range(2))
    epoch, k = again.resume(first.state(1, 2))
    steps = [planner.step(epoch, k, dp) for planner, dp in ((first, 1), (again, 2))]
    assert sorted(steps[0].spans.index.tolist()) == sorted(steps[1].spans.index.tolist())
    with pytest.raises(ValueError, match="lengths was"):
        planner_of(rows(1), 64, **settings).resume(first.state(0, 0))


def test_work_is_that_of_distinct_tokens_and_pairs() -> None:
    data = rows()
    planner = planner_of(data, 64, global_batch=Sequences(48), cost=None)
    plan = planner.step(0, 0, 2)
    shared = [
        THDBatch.collate([data[i] for i in m.tolist()], share_prefixes=True)
        for r in plan.indices_by_rank()
        for m in r
    ]
    cost = planner.cost
    most = sum(cost.linear * b.stats.real_tokens + cost.quadratic * b.stats.sum_squares for b in shared)
    assert float(plan.work.sum()) == pytest.approx(most, rel=0.05)  # strangers may begin with one token alike
    assert float(plan.work.sum()) >= most


def test_a_tree_above_the_capacity_repeats_its_prefix() -> None:
    prompt = list(range(10))
    texts = [np.array([*prompt, 20 + i, 30], "<i4").tobytes() for i in range(9)]
    found = group_prefixes(texts.__getitem__, 4, np.arange(9), 16, 0)
    assert np.diff(found.offsets).tolist() == [3, 3, 3]
    assert found.repeated == 1
    assert found.shared.tolist() == [0, 10, 10] * 3


def test_the_data_module_trains_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    data = rows()
    runs = []
    for share in (False, True):
        module = TinyModule(torch.float64, lr=0.1)
        kinds = list[type]()
        step = module.training_step

        def watched(batch: THDBatch, k: int, step=step, kinds=kinds):  # type: ignore[no-untyped-def]
            kinds.append(type(batch))
            return step(batch, k)

        module.training_step = watched  # type: ignore[method-assign]
        trainer = quiet_trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, strategy="thd",
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        # All sequences are one step, so that both runs learn the same.
        trainer.fit(
            module, THDDataModule(data, capacity=64, global_batch=Sequences(48), share_prefixes=share)
        )
        runs.append((module.outputs, kinds))
    assert runs[1][0] == pytest.approx(runs[0][0], rel=1e-6)
    assert SharedBatch in runs[1][1]
    assert SharedBatch not in runs[0][1]
    assert len(runs[1][1]) < len(runs[0][1])  # fewer packs


def test_what_does_not_go_with_shared_prefixes_is_refused() -> None:
    with pytest.raises(ValueError, match="share_prefixes=True with oversize='split': pieces"):
        planner_of(rows(), 64, global_batch=Packs(1), oversize="split")
    with pytest.raises(ValueError, match="share_prefixes=True with a stream"):
        THDDataModule(iter([{"input_ids": [1, 2]}]), capacity=8, share_prefixes=True)
