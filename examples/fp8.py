"""Packed training in FP8: ``python examples/fp8.py`` rounds to FP8 and multiplies in fp32, on any machine.

On an Ada GPU or newer, pass ``--recipe current`` (Transformer Engine) or another recipe: see ``--help``.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import lightning as L
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from lightning_thd import THDDataModule, THDThroughputMonitor, causal_lm_loss
from lightning_thd.precision import FP8Precision, fp8_report

DATASET = [{"input_ids": list(f"document {i} says {i * i}. ".encode()) * (1 + i % 9)} for i in range(600)]


class Module(L.LightningModule):
    """A small Qwen3, whose layers the plugin converts in place."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        sizes = {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, "num_hidden_layers": 2}
        config = Qwen3Config(
            vocab_size=260, num_attention_heads=4, num_key_value_heads=2, head_dim=hidden_size // 4, **sizes
        )
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="thd").train()
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss; the code is the same as in bf16."""
        loss = causal_lm_loss(self.model, batch)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW; it may be made before or after the conversion, which keeps the weights."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(argv: list[str] | None = None) -> list[float]:
    """Train, and print what ran in FP8."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--recipe", default="emulated", help="emulated, or a recipe of FP8Precision")
    parser.add_argument("--engine", default="te", help="te (Transformer Engine) or torchao")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hidden-size", type=int, default=128)
    given = parser.parse_args(argv)
    warnings.filterwarnings("ignore", ".*does not have many workers")
    if given.recipe == "emulated":
        precision = FP8Precision("tensorwise", engine="torchao", emulate=True)
    else:
        precision = FP8Precision(given.recipe, engine=given.engine)
    torch.manual_seed(0)
    module = Module(given.hidden_size)
    trainer = L.Trainer(
        max_steps=given.steps,
        plugins=precision,
        callbacks=[THDThroughputMonitor(peak="measure", every_n_steps=5)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu" if given.recipe == "emulated" else "auto",  # the emulation has no GPU code
        devices=1,
    )
    trainer.fit(module, THDDataModule(DATASET, capacity=2_048))
    print(fp8_report(module))
    losses = [float(loss) for loss in module.losses]
    print(f"{trainer.precision}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
