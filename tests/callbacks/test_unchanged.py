"""Our callbacks look at a training and never change a bit of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_thd import CUDAGraphCallback, Packs, THDDataModule, THDThroughputMonitor, causal_lm_loss
from lightning_thd.callbacks import PackingCheck
from lightning_thd.integrations import prepare_fabric, prepare_thd
from tests.callbacks.own_models import VOCAB, Own
from tests.tiny import quiet_trainer, sequences, tiny_llama

STEPS = 12
CALLBACKS: dict[str, Callable[[], L.Callback]] = {
    "monitor": lambda: THDThroughputMonitor(peak=1e12, every_n_steps=2),
    "check": PackingCheck,
    "graphs": CUDAGraphCallback,
}


class Recurrent(nn.Module):
    """What the mode sees in one piece: attention of torch's own, a recurrent layer, products of three."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCAB, 8)
        self.rnn = nn.LSTM(8, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.mixed = nn.Parameter(torch.randn(8, 8))
        self.head = nn.Linear(8, VOCAB)
        self.norm = nn.LayerNorm(8)

    def forward(self, batch: Any) -> Tensor:
        rows = []
        for ids in batch.unpack(batch.input_ids):
            with torch.autocast("cpu", enabled=False):  # torch has no such layer in bf16 on every CPU
                x, _ = self.rnn(self.tokens(ids))
            attended, _ = self.attention(x, x, x)
            rows.append(self.norm(x + attended) + torch.einsum("td,de->te", x, self.mixed).relu())
        logits = self.head(torch.nn.functional.dropout(torch.cat(rows), 0.1))
        return nn.functional.cross_entropy(logits, batch.targets, reduction="sum")


class Module(L.LightningModule):
    """A model of one of three kinds, trained with momentum."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        makers = {"own": lambda: Own(1), "rnn": Recurrent, "llama": lambda: tiny_llama(torch.float32)}
        self.kind = kind
        self.model = makers[kind]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.kind == "llama":
            return causal_lm_loss(self.model, batch)
        return self.model(batch) * batch.loss_scale

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def rows(count: int = 60) -> list[dict[str, Any]]:
    """Return the sequences of the training, with ids of either model."""
    return [{"input_ids": row["input_ids"] % VOCAB} for row in sequences(count)]


def trained(kind: str, precision: Any, callbacks: list[L.Callback]) -> list[Tensor]:
    """Return the parameters after some steps."""
    module = Module(kind)
    torch.manual_seed(1)
    trainer = quiet_trainer(max_steps=STEPS, precision=precision, callbacks=callbacks)
    trainer.fit(module, THDDataModule(rows(), capacity=48))
    return [parameter.detach() for parameter in module.parameters()]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", ["own", "rnn", "llama"])
def test_no_callback_changes_a_bit(kind: str, precision: str) -> None:
    plain = trained(kind, precision, [])
    names = [name for name in CALLBACKS if kind == "llama" or name == "monitor"]
    for name in names:
        watched = trained(kind, precision, [CALLBACKS[name]()])
        for a, b in zip(plain, watched, strict=True):
            assert torch.equal(a, b), name


@pytest.mark.parametrize("engine", ["fabric", "accelerate"])
def test_loops_log_the_flops_of_a_model_without_a_config(engine: str) -> None:
    """Both loops, which count by themselves, equal a plain loop to the last bit and count it exactly."""
    import accelerate

    losses = []
    brute = 0
    model = Own(3)
    data = THDDataModule(rows(), capacity=48, global_batch=Packs(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: Any = {"peak": 1e12, "log_every_n_steps": 2, "loss_fn": lambda m, b: m(b) * b.loss_scale}
    if engine == "fabric":
        host = L.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
        host.launch()
        loop = prepare_fabric(host, model, data, optimizer, accumulate=2, **options)
    else:
        accelerate.state.AcceleratorState._reset_state(True)  # of another test in this process
        host = accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
        loop = prepare_thd(host, model, data, optimizer, **options)
    for _, step in zip(range(6), loop.loader, strict=False):
        losses.append(float(loop.backward(step)))
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        brute += sum(model.count(batch.lengths) for batch in step.microbatches)
    half = sum(3 * 4 * layer.heads * layer.head for layer in model.layers if hasattr(layer, "kind"))
    assert half  # the loops count half squares; the oracle counts every pair
    logged = loop.latest
    assert {"train/device/mfu", "train/device/flops_per_sec", "train/total_flops"} <= set(logged)
    assert logged["train/total_flops"] == pytest.approx(brute, rel=0.05)
