"""``router_balance`` of integrations and of ``CausalLMModule``: a step has the loss of sequences alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from transformers import TrainingArguments

from lightning_thd import Sequences, THDBatch, THDDataModule, causal_lm_loss, prepare_thd
from lightning_thd.data.streams import Stream
from lightning_thd.integrations import packed_trainer, prepare_fabric
from lightning_thd.integrations.packed_loop import mean_loss
from lightning_thd.module import CausalLMModule
from tests.loss.test_router_balance import SAMPLES, expert_model, one_at_a_time


def loop_of(engine: str, model: Any, **options: Any) -> Any:
    data = THDDataModule(SAMPLES, capacity=24, global_batch=Sequences(len(SAMPLES)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options = {"peak": 1e9, **options}
    if engine == "fabric":
        return prepare_fabric(Fabric(accelerator="cpu", devices=1), model, data, optimizer, **options)
    return prepare_thd(Accelerator(cpu=True), model, data, optimizer, **options)


def test_every_integration_balances_sequences(tmp_path: Path) -> None:
    model = expert_model("gpt_oss")
    batch = THDBatch.collate(SAMPLES)

    with torch.no_grad():
        expected = pytest.approx(float(one_at_a_time(model, SAMPLES)), rel=1e-9)
        plain = pytest.approx(float(causal_lm_loss(model, batch)), rel=1e-9)

    for engine in ("fabric", "accelerate"):
        loop = loop_of(engine, model, router_balance="sequence")
        step = next(iter(loop.loader))
        assert len(step) > 3
        assert float(loop.backward(step)) == expected

    args: Any = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    options: dict[str, Any] = {"capacity": 256, "router_balance": "sequence"}
    trainer = packed_trainer()(model=model, args=args, train_dataset=SAMPLES, **options)
    module: Any = CausalLMModule(model, router_balance="sequence")
    module._trainer = SimpleNamespace(accumulate_grad_batches=1)
    logged = {}
    module.log = lambda name, value, **_: logged.update({name: float(value)})

    with torch.no_grad():
        assert float(trainer.compute_loss(model, {"batch": batch})) == expected
        assert mean_loss(trainer._loss, model, [batch], device=torch.device("cpu"))[0] == plain
        module.training_step(batch, 0)
        module.validation_step(batch, 0)

    assert logged == {"train/loss": expected, "val/loss": plain}


def test_it_is_an_argument_of_our_loss_only() -> None:
    model = expert_model("gpt_oss")
    with pytest.raises(ValueError, match="'step' is an argument of causal_lm_loss. Leave loss_fn out"):
        loop_of("fabric", model, loss_fn=lambda model, batch: None, router_balance="step")
    with pytest.raises(ValueError, match="wanted one of microbatch, sequence, step"):
        loop_of("fabric", model, router_balance="pack")


def test_streams_know_the_input_tokens_of_a_step() -> None:
    data = THDDataModule(Stream(lambda: iter(SAMPLES)), capacity=24, global_batch=Sequences(7))
    data.attach(rank=0, ranks=1)
    data.setup("fit")
    step = next(iter(data.train_steps()))
    tokens = sum(batch.stats.real_tokens for batch in step.microbatches)
    assert [batch.microbatch for batch in step.microbatches] == list(range(len(step)))
    assert {batch.token_scale for batch in step.microbatches} == {len(step) / tokens}
