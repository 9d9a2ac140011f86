"""Host time of a training step, ours against plain Lightning with "sdpa" on a padded row of as many tokens.

``python -m benchmarks.host_time`` trains one small Llama both ways, where Python and dispatch are most of a
step: hidden size 32, 12 layers, 64 tokens, one thread. The figure is the CPU time of the process from the end
of one step to the end of the next, data loading included. The ways take turns, and the ratio is the median of
the rounds' own ratios. Goals: 1.2 times the plain step, 1.25 times with the throughput monitor.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from itertools import pairwise
from statistics import median
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.results import less
from lightning_thd import THDDataModule, THDThroughputMonitor, causal_lm_loss

TOKENS, PADDING, PART = 64, 8, 24
STEPS, WARM = 80, 20
GOALS = {"ours": 1.2, "ours, with the monitor": 1.25}
PLAIN = "plain Lightning, sdpa"


def config() -> LlamaConfig:
    """Return a Llama so small that arithmetic hardly counts."""
    return LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )


class Timed(L.LightningModule):
    """The CPU seconds at the end of every step."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = LlamaForCausalLM._from_config(config(), attn_implementation=attention)
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """Read the clock."""
        self.ends.append(time.process_time())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the cheapest optimizer."""
        return torch.optim.SGD(self.parameters(), lr=1e-3, foreach=True)


class Packed(Timed):
    """A user's module with packs."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return our loss."""
        return causal_lm_loss(self.model, batch)


class Padded(Timed):
    """A user's module with a padded row and the model's own loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the model's loss."""
        loss: Tensor = self.model(**batch).loss
        return loss


def packs() -> THDDataModule:
    """Return sequences of two lengths, of which two fill a pack."""
    lengths = (PART, TOKENS - PART) * (STEPS + WARM)
    return THDDataModule([{"input_ids": torch.arange(n)} for n in lengths], capacity=TOKENS)


def rows() -> DataLoader[Any]:
    """Return padded rows of one sequence."""
    ids = torch.arange(TOKENS)
    mask = (ids < TOKENS - PADDING).long()
    row = {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask.bool(), -100)}
    return DataLoader([row] * (STEPS + WARM), batch_size=1)  # type: ignore[arg-type]


def step_us(name: str) -> float:
    """Return the median CPU microseconds of a step."""
    plain = name == PLAIN
    module = Padded("sdpa") if plain else Packed("thd")
    monitor = [THDThroughputMonitor(peak=1e12)] if "monitor" in name else []
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=STEPS + WARM,
            callbacks=monitor,
            logger=CSVLogger(folder) if monitor else False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, rows() if plain else packs())
    return median(b - a for a, b in pairwise(module.ends[WARM:])) * 1e6


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args(argv).rounds
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {name: [] for name in (PLAIN, *GOALS)}
    for _ in range(rounds):
        for name, seconds in found.items():
            seconds.append(step_us(name))
    plain = found[PLAIN]
    print(f"{'':<28}{'CPU us a step':>14}{'ratio':>8}{'goal':>6}")
    print(f"{PLAIN:<28}{median(plain):>14,.0f}")
    for name, goal in GOALS.items():
        ratio = median(a / b for a, b in zip(found[name], plain, strict=True))
        print(f"{name:<28}{median(found[name]):>14,.0f}{ratio:>8.3f}{goal:>6}")
        less(f"host time of a step, {name}, times {PLAIN}", ratio, "", goal)


if __name__ == "__main__":
    main()
