"""Small packed models and fits for the tests of FP8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from lightning_thd import THDDataModule, causal_lm_loss
from tests.tiny import quiet_trainer

SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DATA = [{"input_ids": list(f"document {i} ".encode()) * (1 + i % 7)} for i in range(80)]


def llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(**{**SIZES, "tie_word_embeddings": True, **changes})
    return LlamaForCausalLM._from_config(config, attn_implementation="thd").train()


def mixtral(seed: int = 0) -> MixtralForCausalLM:
    torch.manual_seed(seed)
    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    return MixtralForCausalLM._from_config(config, attn_implementation="thd").train()


class Module(L.LightningModule):
    """Trains a model, and keeps what it saw."""

    def __init__(self, model: nn.Module, lr: float = 1e-3) -> None:
        super().__init__()
        self.model = model
        self.lr = lr
        self.losses: list[float] = []
        self.slots: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = causal_lm_loss(self.model, batch)
        self.losses.append(float(loss.detach()))
        self.slots.append(batch.input_ids.numel())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        causal_lm_loss(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), self.lr, eps=1e-5)


def fit(tmp_path: Path, module: Module, plugin: Any, *, steps: int = 4, **settings: Any) -> L.Trainer:
    ckpt_path = settings.pop("ckpt_path", None)
    data = settings.pop("data", None) or THDDataModule(DATA, capacity=250, **settings.pop("given", {}))
    trainer = quiet_trainer(
        **{"max_steps": steps, "plugins": plugin, "default_root_dir": tmp_path, **settings}
    )
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return trainer
