"""Several ranks: one falls back while the other replays, and tensor parallelism inside a captured step."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_thd import THDBatch, THDDataModule, THDDDPStrategy, THDModelParallelStrategy, causal_lm_loss
from lightning_thd.alignment import Alignment
from lightning_thd.callbacks.cuda_graph import CUDAGraphCallback, GraphCosts
from lightning_thd.cuda_graph.recording import RecordingBackend
from lightning_thd.parallel import shard_batch
from lightning_thd.parallel.tensor import apply_tensor_parallel, model_plan
from tests.cuda_graph.support import BUCKETS, GraphModule, graphed, random_batch, worst
from tests.models.families import build
from tests.models.matrix import shake
from tests.ranks import run_ranks
from tests.tiny import largest_error, quiet_trainer, sequences, tiny_llama


def train(graphs: bool, strategy: str) -> dict[str, Any]:
    callbacks: list[L.Callback] = (
        [CUDAGraphCallback(max_sequences=7, backend="recording", require=True)] if graphs else []
    )

    module = GraphModule()
    trainer = quiet_trainer(
        strategy=strategy,
        max_steps=4,
        devices=2,
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
        callbacks=callbacks,
    )
    trainer.fit(module, THDDataModule(sequences(120), capacity=96))

    stats = callbacks[0].stats if callbacks else None  # type: ignore[attr-defined]
    return {
        "params": {name: p.detach() for name, p in module.named_parameters()},
        "outputs": module.outputs,
        "epoch": float(trainer.callback_metrics["train/loss_step"]),
        "replays": stats.replays if stats else 0,
        "fallbacks": stats.fallbacks["num_sequences"] if stats else 0,
    }


@pytest.mark.parametrize(
    "strategy", ["ddp", pytest.param("ddp_find_unused_parameters_true", marks=pytest.mark.slow)]
)
def test_a_rank_may_fall_back_while_the_other_replays(strategy: str) -> None:
    ranks = run_ranks(train, 2, True, strategy)
    expected = run_ranks(train, 2, False, strategy)
    assert ranks[0]["replays"] != ranks[1]["replays"]  # or nothing was shown
    assert min(r["replays"] for r in ranks) > 0
    assert max(r["fallbacks"] for r in ranks) > 0
    for a, b in zip(ranks, expected, strict=True):
        assert largest_error(a["params"], b["params"]) < 1e-12
        assert a["outputs"] == pytest.approx(b["outputs"], rel=1e-12)
        assert a["epoch"] == pytest.approx(b["epoch"], rel=1e-6)


def raw_ddp() -> tuple[float, int, dict[str, int]]:
    model = tiny_llama(torch.float64)
    eager = tiny_llama(torch.float64)
    wrapped = DistributedDataParallel(model)
    reference = DistributedDataParallel(eager)
    step = graphed(wrapped)
    error = 0.0

    for i in range(5):
        batch = random_batch(2 * i + dist.get_rank(), count=14 if i == 2 and dist.get_rank() else 5)
        if i == 0 and dist.get_rank() == 0:  # yet it captures, or the other rank would wait for its vote
            batch = THDBatch.collate([{"input_ids": range(3, 9), "weights": 0.5}])
        model.zero_grad()
        eager.zero_grad()
        step(batch).backward()
        causal_lm_loss(reference, batch).backward()
        pairs = list(zip(model.parameters(), eager.parameters(), strict=True))
        error = max(error, worst([a.grad for a, _ in pairs], [b.grad for _, b in pairs]))

    assert "forward" not in model.__dict__
    return error, step.stats.replays, dict(step.stats.fallbacks)


def test_raw_ddp_loops_synchronise_replayed_gradients() -> None:
    (error_0, replays_0, weighted), (error_1, replays_1, fallbacks) = run_ranks(raw_ddp, 2)
    assert max(error_0, error_1) < 1e-13
    assert (replays_0, weighted) == (4, {"weights": 1})
    assert (replays_1, sum(fallbacks.values())) == (4, 1)


def fails_on_rank_1(model: nn.Module, batch: Any) -> Tensor:
    loss = causal_lm_loss(model, batch)
    return loss * loss.item() if dist.get_rank() else loss


def one_fails() -> tuple[str, int]:
    from lightning_thd.callbacks.cuda_graph import GraphedStep

    step = GraphedStep(
        fails_on_rank_1, tiny_llama(torch.float64), buckets=BUCKETS, backend=RecordingBackend()
    )
    with warnings.catch_warnings(action="ignore"):
        step(random_batch(1, count=4))
    return str(step.off), step.stats.replays


def test_a_capture_that_fails_on_one_rank_is_given_up_on_all() -> None:
    (first, replays_0), (second, replays_1) = run_ranks(one_fails, 2)
    assert "failed on another rank" in first
    assert "fails_on_rank_1: .item()" in second
    assert replays_0 == replays_1 == 0


class Observed(L.LightningDataModule):
    """No planner; the second rank's batches have many sequences, or the first ones are no THDBatch."""

    count = 40
    lists = 0

    def train_dataloader(self) -> Any:
        count, lists = (self.count, self.lists) if dist.get_rank() else (4, 0)
        batches: Any = [random_batch(seed, count=count, longest=3) for seed in range(40)]
        batches[:lists] = [[batch] for batch in batches[:lists]]
        return torch.utils.data.DataLoader(batches, batch_size=None)


def observe(count: int, lists: int) -> tuple[int, bool, int]:
    costs = GraphCosts(eager=1.0, graph=0.5, per_sequence=0.02)
    graphs = CUDAGraphCallback(max_sequences="auto", costs=costs, backend="recording")
    module = GraphModule()
    trainer = quiet_trainer(
        strategy="ddp", max_steps=40, devices=2, callbacks=[graphs], use_distributed_sampler=False
    )
    data = Observed()
    data.count = count
    data.lists = lists
    trainer.fit(module, data)
    assert graphs.plan is not None
    return len(module.outputs), bool(graphs.plan.chosen.sequences), graphs.stats.replays


@pytest.mark.parametrize(("count", "lists", "replays"), [(40, 0, 0), (4, 3, 9), (4, 40, 0)])
def test_ranks_that_saw_different_batches_capture_all_or_none(count: int, lists: int, replays: int) -> None:
    """A rank that captured alone would wait for the other's vote for ever."""
    assert run_ranks(observe, 2, count, lists) == [(40, True, replays), (40, replays > 0, replays)]


def shared_packs() -> tuple[dict[str, int], float, str]:
    batch = THDBatch.collate([{"input_ids": torch.arange(8)}] * 2, align=Alignment.for_(cp=2))
    shard = shard_batch(batch, group=dist.group.WORLD)
    model = tiny_llama(torch.float64)
    step = graphed(model)
    error = abs(float((step(shard) - causal_lm_loss(model, shard)).detach()))
    messages = ""
    for strategy in THDDDPStrategy(context_parallel_size=2), THDModelParallelStrategy(tensor_parallel_size=2):
        callback = CUDAGraphCallback(backend="recording", require=True)
        trainer = quiet_trainer(strategy=strategy, max_steps=1, devices=2, callbacks=[callback])
        with pytest.raises(MisconfigurationException) as caught:
            trainer.fit(GraphModule(), THDDataModule(sequences(8), capacity=96))
        messages += str(caught.value)
    return dict(step.stats.fallbacks), error, messages


def test_shards_run_eagerly() -> None:
    for fallbacks, error, message in run_ranks(shared_packs, 2):
        assert fallbacks == {"context_parallel": 1}
        assert error == 0.0
        assert "context_parallel_size=2 exchanges keys whose number depends on the lengths" in message
        assert "the module is sharded by FSDPModule, whose gathered parameters have no fixed" in message


def compare(name: str, count: int) -> dict[str, Any]:
    model, whole = (build(name, "thd").train().double() for _ in range(2))
    for one in (model, whole):
        torch.manual_seed(0)
        shake(one)

    apply_tensor_parallel(model, model_plan(model), init_device_mesh("cpu", (2,)))
    step = graphed(model)
    result: dict[str, Any] = {"loss": 0.0, "gradients": 0.0}

    for seed in range(count):
        batch = random_batch(seed)  # the same on both ranks
        model.zero_grad()
        whole.zero_grad()
        loss = step(batch)
        expected = causal_lm_loss(whole, batch)
        loss.backward()
        expected.backward()
        result["loss"] = max(result["loss"], abs(float(loss.detach() / expected.detach()) - 1))
        pairs = [(a.grad, b.grad) for a, b in zip(model.parameters(), whole.parameters(), strict=True)]
        full = [a.full_tensor() if isinstance(a, DTensor) else a for a, _ in pairs]
        result["gradients"] = max(result["gradients"], worst(full, [b for _, b in pairs]))

    cut = sum(isinstance(p, DTensor) for p in model.parameters())
    return {**result, "cut": cut, "replays": step.stats.replays, "fallbacks": dict(step.stats.fallbacks)}


@pytest.mark.parametrize(
    ("name", "count"), [("qwen3", 6), pytest.param("gemma2", 20, marks=pytest.mark.slow)]
)
def test_replays_with_their_collectives_equal_the_whole_model(name: str, count: int) -> None:
    tolerance = 1e-6 if name == "gemma2" else 1e-12  # it computes parts in fp32
    for of_rank in run_ranks(compare, 2, name, count):
        assert of_rank["cut"] >= 10
        assert of_rank["loss"] < tolerance
        assert of_rank["gradients"] < tolerance
        assert of_rank["replays"] >= count // 2
        assert of_rank["fallbacks"] == {"tokens": count - of_rank["replays"]}
