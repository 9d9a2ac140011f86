"""Tensor parallelism of this package inside captured steps; FSDP is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_thd import THDDataModule, THDModelParallelStrategy, causal_lm_loss
from lightning_thd.callbacks.cuda_graph import CUDAGraphCallback
from lightning_thd.parallel.tensor import apply_tensor_parallel, model_plan
from tests.cuda_graph.support import GraphModule, graphed, random_batch, worst
from tests.models.families import build
from tests.models.matrix import shake
from tests.ranks import run_ranks
from tests.tiny import quiet_trainer, sequences


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
        loss, wanted = step(batch), causal_lm_loss(whole, batch)
        loss.backward()
        wanted.backward()
        result["loss"] = max(result["loss"], abs(float(loss.detach() / wanted.detach()) - 1))
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
    for found in run_ranks(compare, 2, name, count):
        assert found["cut"] >= 10
        assert found["loss"] < tolerance
        assert found["gradients"] < tolerance
        assert found["replays"] >= count // 2
        assert found["fallbacks"] == {"tokens": count - found["replays"]}


def fit_sharded(require: bool) -> tuple[str, int, int]:
    callback = CUDAGraphCallback(max_sequences=9, backend="recording", require=require)
    module = GraphModule()
    trainer = quiet_trainer(
        strategy=THDModelParallelStrategy(tensor_parallel_size=2),
        max_steps=2,
        devices=2,
        callbacks=[callback],
    )
    message = ""
    try:
        trainer.fit(module, THDDataModule(sequences(90), capacity=96))
    except MisconfigurationException as error:
        message = str(error)
    return message, len(module.outputs), callback.stats.replays


def fit_both() -> list[tuple[str, int, int]]:
    return [fit_sharded(False), fit_sharded(True)]


def test_fsdp_trains_without_graphs_or_raises_where_they_are_required() -> None:
    for idle, (message, steps, _) in run_ranks(fit_both, 2):
        assert idle == ("", 2, 0)
        assert "the module is sharded by FSDPModule, whose gathered parameters have no fixed" in message
        assert steps == 0
