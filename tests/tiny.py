"""A small model, data of varying length, and a hand-written training loop without packing: the oracle."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.packing import PackPlanner

VOCAB = 64


def tiny_llama(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=VOCAB,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="thd").to(dtype).train()


def sequences(count: int, *, labels: bool = False, seed: int = 0, longest: int = 24) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    samples: list[dict[str, Any]] = [
        {"input_ids": rng.integers(0, VOCAB, int(rng.integers(1, longest + 1)))} for _ in range(count)
    ]
    for sample in samples if labels else []:
        ids = sample["input_ids"]
        sample["labels"] = np.where(rng.random(len(ids)) < 0.5, -100, ids)
    return samples


class TinyModule(L.LightningModule):
    """SGD with momentum and a decaying rate; records what it saw."""

    def __init__(self, dtype: torch.dtype = torch.float64, *, lr: float = 0.5) -> None:
        super().__init__()
        self.model = tiny_llama(dtype)
        self.lr = lr
        self.seen: list[tuple[int, ...]] = []
        self.outputs: list[float] = []
        self.zero_grads = 0
        self.clips = 0

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        self.seen.append(batch.sequence_ids)
        loss = causal_lm_loss(self.model, batch)
        self.log("train/loss", loss.detach(), on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(float(outputs["loss"]))

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.zero_grads += 1

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.clips += 1
        super().configure_gradient_clipping(*args, **kwargs)

    def validation_step(self, batch: THDBatch, batch_idx: int) -> None:
        self.log("val/loss", causal_lm_loss(self.model, batch), sync_dist=True)

    def predict_step(self, batch: THDBatch, batch_idx: int) -> list[tuple[int, Tensor]]:
        logits = self.model(**batch.hf_kwargs()).logits
        return list(zip(batch.sequence_ids, batch.unpack(logits), strict=True))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.lr, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def quiet_trainer(**options: Any) -> L.Trainer:
    """Make a Trainer on CPU that logs, saves and prints nothing, unless the options say otherwise."""
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return L.Trainer(**{"accelerator": "cpu", "devices": 1, **dict.fromkeys(names, False), **options})


def nll(model: nn.Module, sample: dict[str, Any]) -> tuple[Tensor, int]:
    """Sum the loss of one sequence that is run alone, and count its targets."""
    ids = torch.as_tensor(sample["input_ids"]).long()
    labels = torch.as_tensor(sample.get("labels", sample["input_ids"])).long()
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    total = torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum", ignore_index=-100)
    return total, int((labels[1:] != -100).sum())


def train_by_hand(
    samples: list[dict[str, Any]], planner: PackPlanner, steps: int, *, dp: int = 1, clip: float = 0.5
) -> tuple[dict[str, Tensor], list[float]]:
    """Train ``TinyModule``'s model on the planner's steps, every sequence alone, the mean over all tokens."""
    module = TinyModule()
    model = copy.deepcopy(module.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=module.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    batches = ([samples[i] for i in ids] for ids in planned(planner, steps, dp))
    return train_alone(model, batches, optimizer, schedule, clip=clip)


def planned(planner: PackPlanner, steps: int, dp: int = 1) -> Iterator[list[int]]:
    """Yield the sequences of every step of a plan, over all its ranks and packs."""
    for k in range(steps):
        plan = planner.step(*divmod(k, len(planner)), dp)
        yield [int(i) for rank in plan.indices_by_rank() for pack in rank for i in pack]


def train_alone(
    model: nn.Module,
    steps: Iterable[Sequence[dict[str, Any]]],
    optimizer: torch.optim.Optimizer,
    schedule: Any = None,
    *,
    clip: float = 0.5,
) -> tuple[dict[str, Tensor], list[float]]:
    """Train on the mean over all loss tokens of every step, each sequence alone; the oracle of all loops."""
    losses = []
    for samples in steps:
        results = [nll(model, sample) for sample in samples]
        loss = sum(total for total, _ in results) / sum(count for _, count in results)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.append(float(loss.detach()))
    return {name: p.detach().clone() for name, p in model.named_parameters()}, losses


def largest_error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the largest ||found - wanted|| / ||wanted|| over all tensors."""
    assert found.keys() == wanted.keys()
    return max(float((found[n] - w).norm() / w.norm().clamp_min(1e-30)) for n, w in wanted.items())


def checkpoint_activations(model: Any, **options: Any) -> None:
    """Switch activation checkpointing on, under its name of this transformers (5.23 renamed it)."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options or None)
