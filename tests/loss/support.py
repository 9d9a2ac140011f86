"""A batch, its loss from the model's own logits, and gradients: what several tests of losses use."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_thd.batch import THDBatch
from tests.loss.families import VOCAB


def make_batch(
    *, ignored: float = 0.0, lengths: tuple[int, ...] = (5, 9, 1, 13), pad_to: int | None = None
) -> THDBatch:
    generator = torch.Generator().manual_seed(1)
    samples = []
    for length in lengths:
        ids = torch.randint(3, VOCAB, (length,), generator=generator)
        labels = torch.where(torch.rand(length, generator=generator) < ignored, -100, ids)
        samples.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return THDBatch.collate(samples, pad_to=pad_to)


def oracle(model: nn.Module, batch: THDBatch) -> Tensor:
    outputs = model(**batch.hf_kwargs())
    total = F.cross_entropy(outputs.logits[0], batch.targets, reduction="sum") * batch.loss_scale
    if getattr(outputs, "aux_loss", None) is not None:
        total = total + outputs.aux_loss * model.config.router_aux_loss_coef
    return total


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
