"""Shared prefixes on ranks of every kind give the losses and weights of one process without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_thd import Sequences, THDDataModule
from lightning_thd.packing.prefixes import PrefixPlanner
from tests.ranks import run_ranks
from tests.strategies.jobs import (
    CLIP,
    INTERLEAVED,
    Job,
    Layout,
    family_model,
    full_parameters,
    make_optimizer,
    make_trainer,
    strict_warnings,
)
from tests.tiny import VOCAB, largest_error, nll
from tests.wide import nothing_narrower

STEPS = 4  # fp64: other orders of the same sums
TOLERANCE = 1e-9
BATCH = Sequences(21)
CAPACITY = 40
EMBEDDING = "model.embed_tokens.weight"
SEQUENCE_PARALLEL = {"sequence_parallel": True}


def rows() -> list[dict[str, Any]]:
    """Draw 14 prompts with three answers each, some of whose prompts are learned, in no order."""
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(14):
        prompt = rng.integers(0, VOCAB, int(rng.integers(3, 14)))
        for _ in range(3):
            ids = np.concatenate([prompt, rng.integers(0, VOCAB, int(rng.integers(1, 8)))])
            learned = rng.random(len(ids)) < 0.6
            samples.append({"input_ids": ids, "labels": np.where(learned, ids, -100)})
    return [samples[i] for i in rng.permutation(len(samples))]


class Watched(Job):
    """Records which sequences each step has, and how many of their tokens were not computed."""

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.seen: list[list[int]] = []
        self.shared = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append([i for one in batch.microbatches for i in one.sequence_ids])
        self.shared += sum(one.stats.shared_tokens for one in batch.microbatches)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job of the steps ``first`` to ``stop``; one that begins later resumes from a checkpoint."""

    layout: Layout
    family: str = "qwen3"
    first: int = 0
    stop: int = STEPS
    save: bool = False


def run(case: Case, folder: str) -> dict[str, Any]:
    strict_warnings()
    module = Watched(case.family)
    trainer = make_trainer(case.layout, case.family, max_steps=case.stop)
    data = THDDataModule(rows(), capacity=CAPACITY, global_batch=BATCH, share_prefixes=True)
    trainer.fit(module, data, ckpt_path=f"{folder}/step-{case.first}.ckpt" if case.first else None)
    if case.save:
        trainer.save_checkpoint(f"{folder}/step-{case.stop}.ckpt")
    names = ("losses", "seen", "shared")
    return {"params": full_parameters(module.model), **{name: getattr(module, name) for name in names}}


def run_all(cases: Sequence[Case], folder: str) -> list[dict[str, Any]]:
    with nothing_narrower():
        return [run(case, folder) for case in cases]


@cache
def by_hand(family: str, steps: int) -> dict[str, Any]:
    """Train on every sequence alone, in the order of the plan for one rank."""
    samples = rows()
    ids = [row["input_ids"].astype("<i4").tobytes() for row in samples]
    planner = PrefixPlanner(
        [len(row["input_ids"]) for row in samples], CAPACITY, ids=ids.__getitem__, global_batch=BATCH
    )
    model = family_model(family)
    optimizer = make_optimizer(model)
    losses = []
    seen = []

    for k in range(steps):
        plan = planner.step(*divmod(k, len(planner)), 1)
        seen.append(sorted(plan.spans.index.tolist()))
        with nothing_narrower():
            results = [nll(model, samples[i]) for i in seen[-1]]
            loss = sum(total for total, _ in results) / sum(count for _, count in results)
            optimizer.zero_grad()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(float(loss.detach()))

    return {"params": dict(model.named_parameters()), "losses": losses, "seen": seen}


def compare(case: Case, found: Sequence[dict[str, Any]], wanted: dict[str, Any]) -> None:
    """Compare all ranks of a job, from its first step on, with one process."""
    steps = slice(case.first, case.stop)
    names: set[str] = set()

    for rank in found:
        renamed = {} if "lm_head.weight" in wanted["params"] else {"lm_head.weight": EMBEDDING}
        params = {renamed.get(name, name): value for name, value in rank["params"].items()}
        names |= params.keys()
        assert (
            largest_error(params, {name: wanted["params"][name].detach() for name in params}) < TOLERANCE
        ), case
        assert rank["shared"] > 0

    assert names == wanted["params"].keys()
    losses = np.mean([rank["losses"] for rank in found], axis=0)
    assert losses.tolist() == pytest.approx(wanted["losses"][steps], rel=TOLERANCE), case

    others = case.layout.world // case.layout.dp
    for k, ids in enumerate(wanted["seen"][steps]):
        assert sorted(i for rank in found for i in rank["seen"][k]) == sorted(ids * others), case


TWO = [
    Case(layout=Layout(strategy="thd_ddp", dp=2), stop=2, save=True),
    Case(layout=Layout(tp=2), stop=2),
    Case(layout=Layout(cp=2), stop=2),
    Case(layout=Layout(pp=2), family="qwen3@4", stop=2),
]
FOUR = [
    Case(layout=Layout(dp=4, options={"data_parallel_replicas": 2}), first=2),
    Case(layout=Layout(dp=2, tp=2), family="gemma3"),
    Case(layout=Layout(tp=2, dp=2, options=SEQUENCE_PARALLEL)),
    Case(layout=Layout(dp=2, tp=2), family="qwen3_moe"),
    Case(layout=Layout(pp=2, dp=2, options=INTERLEAVED), family="qwen3@4"),
    Case(layout=Layout(pp=2, tp=2), family="qwen3@4t"),
    Case(layout=Layout(cp=2, dp=2, options={"context_parallel_layout": "contiguous"}), family="qwen3_moe"),
    Case(layout=Layout(cp=4, strategy="thd_ddp"), family="gemma3"),
    Case(layout=Layout(cp=2, tp=2)),
    Case(layout=Layout(pp=2, dp=2), family="qwen3_moe@4"),
]


def check(cases: Sequence[Case], folder: Path) -> None:
    (world,) = {case.layout.world for case in cases}
    results = run_ranks(run_all, world, cases, str(folder), timeout_s=600.0)
    for i, case in enumerate(cases):
        compare(case, [rank[i] for rank in results], by_hand(case.family, case.stop))


def test_two_ranks_of_every_kind_and_one_that_goes_on(tmp_path: Path) -> None:
    check(TWO, tmp_path)
    check([Case(layout=Layout(strategy="thd_ddp"), first=2)], tmp_path)


@pytest.mark.slow
def test_four_ranks_of_every_kind_and_four_that_go_on(tmp_path: Path) -> None:
    check([Case(layout=Layout(dp=2), stop=2, save=True)], tmp_path)
    check(FOUR, tmp_path)
