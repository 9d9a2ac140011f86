"""``capacity="auto"`` on an imagined GPU with a budget of bytes: the real path, and its predicted peak."""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_thd import THDBatch, THDDataModule, causal_lm_loss
from lightning_thd.memory import MemoryModel, Training
from tests.imagined.gpu import imagined_gpu
from tests.tiny import quiet_trainer, sequences

BUDGET = 400_000_000
CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, vocab_size=256
)


class Module(L.LightningModule):
    """A small model, which measures the peak of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaForCausalLM._from_config(CONFIG, attn_implementation="thd")
        self.slots: list[int] = []

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            torch.cuda.reset_peak_memory_stats()
        self.slots.append(batch.input_ids.shape[-1])
        return causal_lm_loss(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


def main() -> None:
    with imagined_gpu():
        torch.cuda.mem_get_info = lambda device=None: (BUDGET, BUDGET)
        torch.cuda.memory_reserved = lambda device=None: 0
        module = Module()
        data = THDDataModule(sequences(4_000, longest=100), capacity="auto")
        trainer = quiet_trainer(accelerator="gpu", max_steps=3)
        trainer.fit(module, data)
        peak = torch.cuda.max_memory_allocated()

    capacity: Any = data.capacity
    memory = MemoryModel.from_config(CONFIG)
    training = Training(precision="32-true")
    predicted = memory.peak(capacity, training)

    assert capacity == memory.largest_capacity(int(BUDGET * 0.95), training), capacity
    assert max(module.slots) > 0.95 * capacity

    sys.stdout.write(f"capacity {capacity:,}, peak {peak:,}, predicted {predicted:,}\n")
    assert abs(peak / predicted - 1) < 0.1

    sys.stdout.write("within a tenth\n")


if __name__ == "__main__":
    main()
