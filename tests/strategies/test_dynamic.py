"""Steps whose microbatches are shared by 1, 2 or 4 ranks give the parameters of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_thd import Packs, Sequences, THDBatch, THDDataModule
from lightning_thd.packing import PackPlanner
from lightning_thd.packing.sharing import DynamicPlanner, Sharing
from lightning_thd.strategies import THDDDPStrategy, THDModelParallelStrategy
from tests.ranks import run_ranks
from tests.strategies.jobs import (
    CLIP,
    Job,
    Layout,
    family_model,
    full_parameters,
    make_optimizer,
    make_trainer,
    strict_warnings,
)
from tests.tiny import VOCAB, largest_error, nll, train_alone

CAPACITY = 16
LARGEST = 4
STEP = Sequences(10)
COUNT = 40  # sequences, of four steps an epoch
TOLERANCE = 1e-10  # fp64: other orders of the same sums


def samples() -> list[dict[str, Any]]:
    """Lengths from 1 to 60: most fit one rank of 16 slots, some need two or four."""
    rng = np.random.default_rng(3)
    lengths = np.clip(rng.lognormal(2.0, 1.0, COUNT).astype(int), 1, 60)
    rows = [{"input_ids": rng.integers(0, VOCAB, n)} for n in lengths]
    for sample in rows:
        ids = sample["input_ids"]
        sample["labels"] = np.where(rng.random(len(ids)) < 0.3, -100, ids)
    return rows


class Watched(Job):
    """A job that keeps the degree and the slots of every microbatch."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.degrees: list[int] = []
        self.slots: list[int] = []
        self.ids: list[tuple[int, ...]] = []
        self.tokens = 0

    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        self.degrees.append(batch.boundaries.ranks)
        self.slots.append(batch.input_ids.shape[-1])
        self.tokens += batch.stats.real_tokens
        leads = batch.boundaries.ranks == 1 or batch.boundaries.layout.rank == 0
        self.ids.append(batch.sequence_ids if leads else ())
        return super().training_step(batch, batch_idx)


def strategy(name: str, **options: Any) -> Any:
    kind = THDDDPStrategy if name == "thd_ddp" else THDModelParallelStrategy
    return kind(context_parallel_size="dynamic", max_context_parallel_size=LARGEST, **options)


def run(
    name: str,
    family: str,
    steps: int,
    options: dict[str, Any],
    folder: str | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    strict_warnings()
    module = Watched(family, torch.float64)
    layout = Layout(dp=dist.get_world_size())
    degree = options.pop("largest", LARGEST)
    global_batch = options.pop("global_batch", STEP)

    made = strategy(name, **options)
    made.max_context_parallel_size = degree
    saving = [] if folder is None else [ModelCheckpoint(folder, every_n_train_steps=6, filename="half")]
    trainer = make_trainer(
        layout, family, strategy=made, max_steps=steps, callbacks=saving, enable_checkpointing=bool(saving)
    )

    data = THDDataModule(
        samples(), capacity=CAPACITY * LARGEST // degree, global_batch=global_batch, val=samples()[:8]
    )
    trainer.fit(module, data, ckpt_path=f"{folder}/half.ckpt" if resume else None)

    losses = torch.tensor(module.losses, dtype=torch.float64)
    dist.all_reduce(losses)

    return {
        "params": full_parameters(module.model),
        "losses": (losses / dist.get_world_size()).tolist(),
        "degrees": module.degrees,
        "slots": module.slots,
        "ids": module.ids,
        "logged": float(trainer.callback_metrics["train/loss"]),
        "tokens": module.tokens,
        "val": float(trainer.callback_metrics.get("val/loss", 0.0)),
        "bytes_per_token": float(trainer.callback_metrics["context_parallel/bytes_per_token"]),
    }


def by_hand(family: str, steps: int, planner: PackPlanner | None = None) -> dict[str, Any]:
    data = samples()
    planner = planner or PackPlanner([len(s["input_ids"]) for s in data], 10_000, global_batch=STEP)
    model = family_model(family, torch.float64)
    batches = ([data[i] for i in ids_of(planner, *divmod(k, len(planner)))] for k in range(steps))
    params, losses = train_alone(model, batches, make_optimizer(model), clip=CLIP)
    with torch.no_grad():
        results = [nll(model, sample) for sample in data[:8]]
    val = float(sum(total for total, _ in results) / sum(count for _, count in results))
    return {"params": params, "losses": losses, "val": val}


def ids_of(planner: PackPlanner, epoch: int, at: int) -> list[int]:
    """Name the sequences of a step, those of a pack that ranks share once."""
    plan = planner.step(epoch, at, LARGEST if isinstance(planner, DynamicPlanner) else 1)
    return np.unique(plan.spans.index).tolist()


def check(found: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    assert max(largest_error(rank["params"], wanted["params"]) for rank in found) < TOLERANCE
    for rank in found:
        assert rank["losses"] == pytest.approx(wanted["losses"][-len(rank["losses"]) :], rel=TOLERANCE)
        assert max(rank["slots"]) <= CAPACITY * LARGEST // 2  # capacity of the run with the smaller degree
    assert len({len(rank["degrees"]) for rank in found}) == 1  # every rank as many microbatches
    assert found[0]["logged"] == pytest.approx(wanted["losses"][-1], rel=1e-6)


def run_all(runs: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [run(*one) for one in runs]


CONTIGUOUS = {"context_parallel_layout": "contiguous"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "family", "options"), [("thd_model_parallel", "qwen3_moe", {}), ("thd_ddp", "lfm2", CONTIGUOUS)]
)
def test_other_families_equal_one_process(name: str, family: str, options: dict[str, Any]) -> None:
    steps = 3 if options else 8
    compare(run_ranks(run, 4, name, family, steps, options), family, steps)


def compare(found: list[dict[str, Any]], family: str, steps: int) -> None:
    expected = by_hand(family, steps)
    check(found, expected)
    if steps == 8:  # two epochs, each with an evaluation while shards are alive
        assert found[0]["val"] == pytest.approx(expected["val"], rel=1e-6)
    lengths = [len(sample["input_ids"]) for sample in samples()]
    assert sum(rank["tokens"] for rank in found) == steps // 4 * sum(lengths) or steps < 4
    assert any(rank["bytes_per_token"] > 0 for rank in found)  # in the last step, which may share few packs
    degrees = {degree for rank in found for degree in rank["degrees"]}
    assert max(degrees) == LARGEST
    assert degrees == {1, 2, 4} or family == "lfm2"
    for rank in found:
        assert max(rank["slots"]) <= CAPACITY


def test_steps_of_mixed_lengths_and_of_packs_equal_one_process() -> None:
    needed = {"context_parallel_communication": "needed"}
    runs = [("thd_ddp", "qwen3", 8, {}), ("thd_model_parallel", "qwen3", 3, needed)]
    packs = ("thd_ddp", "qwen3", 3, {"global_batch": Packs(2)})
    ddp, shards, of_packs = zip(*run_ranks(run_all, 4, [*runs, packs]), strict=True)
    compare(list(ddp), "qwen3", 8)
    compare(list(shards), "qwen3", 3)
    lengths = [len(sample["input_ids"]) for sample in samples()]
    planner = DynamicPlanner(
        lengths, CAPACITY, global_batch=Packs(2), sharing=Sharing(max_degree=LARGEST, layout="dual_chunk")
    )
    check(list(of_packs), by_hand("qwen3", 3, planner))
    assert {degree for rank in of_packs for degree in rank["degrees"]} == {1, 2, 4}


def half_then(folder: str) -> dict[str, Any]:
    return run("thd_ddp", "qwen3", 6, {}, folder)


def rest(folder: str) -> dict[str, Any]:
    return run("thd_ddp", "qwen3", 14, {"largest": 2}, folder, True)


@pytest.mark.slow
def test_a_job_goes_on_with_other_ranks_and_degrees(tmp_path: Path) -> None:
    first = run_ranks(half_then, 4, str(tmp_path))
    second = run_ranks(rest, 2, str(tmp_path))
    check(second, by_hand("qwen3", 14))
    seen = sorted(i for job in (first, second) for rank in job for ids in rank["ids"] for i in ids)
    assert len(seen) == 14 * STEP.n
    assert all(seen.count(i) in (3, 4) for i in range(COUNT))


@pytest.mark.slow
def test_replicas_that_share_weights_equal_one_process() -> None:
    options = {"largest": 2, "data_parallel_replicas": 2}
    ranks = run_ranks(run, 4, "thd_model_parallel", "qwen3", 3, options)
    check(ranks, by_hand("qwen3", 3))
    assert {degree for rank in ranks for degree in rank["degrees"]} == {1, 2}
