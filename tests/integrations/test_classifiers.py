"""Losses of whole sequences on two ranks: training and evaluation are means over sequences, in every host."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import accelerate
import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, BertConfig, TrainingArguments

from lightning_thd import Sequences, THDBatch, THDDataModule, prepare_thd
from lightning_thd.integrations import packed_trainer, prepare_fabric
from tests.ranks import run_ranks
from tests.tiny import quiet_trainer, sequences

STEPS = 3
CAPACITY = 32
CLASSES = 3
LR = 0.1
ROWS = [
    {**row, "label": i % CLASSES} for i, row in enumerate(sequences(60, seed=2)) if len(row["input_ids"]) > 1
]
TRAIN = ROWS[:33]
VALS = (ROWS[33:44], ROWS[44:45])  # of one sequence, a rank has none
# The rows of each step, the parameters behind the last, and the losses of ``VALS`` before the first.
Found = tuple[list[list[int]], dict[str, Tensor], list[float]]


def classifier() -> nn.Module:
    torch.manual_seed(0)
    off = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = BertConfig(vocab_size=64, num_labels=CLASSES, **sizes, **off)
    model: nn.Module = AutoModelForSequenceClassification.from_config(config, attn_implementation="thd")
    return model.double().train()


def by_sequences(model: nn.Module, batch: THDBatch) -> Tensor:
    """Weigh a model's own mean as the page about classification does."""
    loss: Tensor = model(**batch.hf_kwargs()).loss
    assert batch.sequence_scale is not None
    return loss * len(batch) * batch.sequence_scale


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def data(val: Any) -> THDDataModule:
    return THDDataModule(TRAIN, val=val, capacity=CAPACITY, global_batch=Sequences(11))


def in_lightning() -> Found:
    steps: dict[int, list[int]] = {}

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = classifier()

        def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
            steps.setdefault(self.global_step, []).extend(batch.sequence_ids)
            return by_sequences(self.model, batch)

        def validation_step(self, batch: THDBatch, batch_idx: int) -> None:
            self.log("val/loss", self.model(**batch.hf_kwargs()).loss, sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    module = Module()
    evaluated = []
    options: Any = {"strategy": "thd_ddp", "devices": 2, "limit_val_batches": None}
    for val in VALS:
        [metrics] = quiet_trainer(**options).validate(module, datamodule=data(val), verbose=False)
        evaluated.append(metrics["val/loss"])
    quiet_trainer(max_steps=STEPS, **options).fit(module, datamodule=data(None))
    return list(steps.values()), parameters(module.model), evaluated


def in_a_loop(loop: Any, model: nn.Module) -> Found:
    sets = [THDDataModule(val=val, capacity=CAPACITY) for val in VALS]
    evaluated = [loop.evaluate(one)["val/loss"] for one in sets]
    steps = []
    while len(steps) < STEPS:
        for step in loop.loader:
            loop.backward(step)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            steps.append([i for batch in step.microbatches for i in batch.sequence_ids])
            if len(steps) == STEPS:
                break
    return steps, parameters(model), evaluated


def in_accelerate() -> Found:
    model = classifier()
    host = accelerate.Accelerator(cpu=True)
    loop = prepare_thd(host, model, data(None), sgd(model), loss_fn=by_sequences, peak=1e9)
    return in_a_loop(loop, model)


def in_fabric() -> Found:
    model = classifier()
    host = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    host.launch()
    loop = prepare_fabric(host, model, data(None), sgd(model), loss_fn=by_sequences, peak=1e9)
    return in_a_loop(loop, model)


def in_trainer() -> Found:
    steps = []

    class Noting(packed_trainer()):  # type: ignore[misc]
        def training_step(self, model: nn.Module, inputs: Any, *args: Any) -> Tensor:
            steps.append([i for batch in inputs["batch"].microbatches for i in batch.sequence_ids])
            loss: Tensor = super().training_step(model, inputs, *args)
            return loss

    with tempfile.TemporaryDirectory() as folder:
        settings: Any = {"max_steps": STEPS, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
        settings |= {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
        model = classifier()
        trainer = Noting(
            model=model,
            args=TrainingArguments(str(Path(folder)), **settings),
            train_dataset=TRAIN,
            optimizers=(sgd(model), None),
            capacity=CAPACITY,
            peak=1e9,
            data_kwargs={"global_batch": Sequences(11)},
        )
        evaluated = [trainer.evaluate(val)["eval_loss"] for val in VALS]
        trainer.train()
    return steps, parameters(model), evaluated


HOSTS = {"lightning": in_lightning, "accelerate": in_accelerate, "fabric": in_fabric, "trainer": in_trainer}


def in_all() -> dict[str, Found]:
    """Run the hosts one after another, and put together which rows the ranks ran in every step."""
    results = {}
    for name, run in HOSTS.items():
        steps, weights, evaluated = run()
        of_ranks: list[Any] = [None, None]
        dist.all_gather_object(of_ranks, steps)
        assert of_ranks[0] != of_ranks[1]
        together = [sorted([*first, *second]) for first, second in zip(*of_ranks, strict=True)]
        results[name] = together, weights, evaluated
    return results


def loss_alone(model: Any, rows: list[dict[str, Any]]) -> Tensor:
    """Return the mean over sequences, one at a time."""
    losses = []
    for row in rows:
        logits = model(input_ids=torch.as_tensor(row["input_ids"])[None]).logits
        losses.append(F.cross_entropy(logits, torch.tensor([row["label"]])))
    return torch.stack(losses).mean()


def test_two_ranks_equal_sequences_alone() -> None:
    with torch.no_grad():
        evaluated = [float(loss_alone(classifier(), val)) for val in VALS]

    for of_rank in run_ranks(in_all, 2, timeout_s=300):
        for name, (steps, weights, actual) in of_rank.items():
            assert actual == pytest.approx(evaluated, rel=1e-6), name  # Lightning's metrics are fp32

            model = classifier()
            optimizer = sgd(model)
            assert len(steps) == STEPS, name
            for step in steps:
                assert len(step) == 11, name
                optimizer.zero_grad()
                loss_alone(model, [TRAIN[i] for i in step]).backward()
                optimizer.step()

            for key, expected in parameters(model).items():
                torch.testing.assert_close(weights[key], expected, rtol=1e-9, atol=1e-12, msg=f"{name} {key}")
