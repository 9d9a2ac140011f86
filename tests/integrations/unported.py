"""A small model of one's own, ported to packs or not, for tests of who asks a batch for its boundaries."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_thd import THDBatch, varlen_attention

VOCAB = 64  # the vocabulary of tests.tiny.sequences
SIZE = 16
HEADS = 2


class Own(nn.Module):
    """One layer of attention; not ``ported``, it attends over the row of slots."""

    def __init__(self, ported: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ported = ported
        self.tokens = nn.Embedding(VOCAB, SIZE)
        self.head = nn.Linear(SIZE, VOCAB)
        self.qkv = nn.Linear(SIZE, 3 * SIZE)

    def forward(self, batch: THDBatch) -> Tensor:
        x = self.tokens(batch.input_ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(1)
        if self.ported:
            attended = varlen_attention(q, k, v, batch.boundaries)
        else:
            rows = (each.transpose(0, 1)[None] for each in (q, k, v))
            attended = F.scaled_dot_product_attention(*rows, is_causal=True)[0].transpose(0, 1)
        logits: Tensor = self.head(x + attended.flatten(1))
        return logits


def loss_of(model: nn.Module, batch: THDBatch) -> Tensor:
    """Return the sum over the targets, times the batch's scale."""
    return F.cross_entropy(model(batch), batch.targets, reduction="sum") * batch.loss_scale


class Module(L.LightningModule):
    """Trains, validates and predicts with a model of one's own, and looks at all that is no boundary."""

    def __init__(self, ported: bool, *, compiled: bool = False, looks: bool = True) -> None:
        super().__init__()
        self.looks = looks
        self.model = Own(ported)
        if compiled:
            self.model.compile(backend="eager")

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        if self.looks:
            batch = batch.to(self.device)
            self.log("sequences", float(len(batch)), batch_size=batch.loss_tokens)
            assert str(batch)
        return loss_of(self.model, batch)

    def validation_step(self, batch: THDBatch, batch_idx: int) -> None:
        self.log("val/loss", loss_of(self.model, batch))

    test_step = validation_step

    def predict_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        return batch.pool(self.model(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)
