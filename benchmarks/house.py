"""The size of the package, and what one training step walks through.

``python -m benchmarks.house`` prints lines and modules of ``lightning_thd``, lines of the tests, and the
calls and files of this package in a plain training step of a one-layer model on one CPU: named functions and
resumed generators of all threads, packs of 256 slots, no callback of ours. ``--calls`` lists them by file.
"""

from __future__ import annotations

import argparse
import logging
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.results import less
from lightning_thd import THDBatch, THDDataModule, causal_lm_loss

ROOT = Path(__file__).parent.parent
PACKAGE = str(ROOT / "lightning_thd") + "/"
# Steps before the first are left out because caches fill in them.
FIRST_STEP, LAST_STEP = 20, 40
# Goals of the third round: the package shrank from 58,811 lines in 369 modules, its tests from 52,294 lines.
LINES, MODULES, TEST_LINES, CALLS, FILES = 44_000, 220, 40_000, 200, 30


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def lines(folder: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in sources(folder))


class Counted(L.Callback):
    """Counts the calls of this package while it is active, as ``sys.setprofile`` reports them."""

    def __init__(self) -> None:
        self.active = False
        self.calls: Counter[tuple[str, str]] = Counter()

    def see(self, frame: FrameType, event: str, _: Any) -> None:
        """Count a call, as ``sys.setprofile`` hands it over."""
        code = frame.f_code
        ours = code.co_filename.startswith(PACKAGE) and code.co_name[0] != "<"
        if self.active and ours and event == "call":
            self.calls[code.co_filename.removeprefix(PACKAGE), code.co_name] += 1

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Begin and end with the steps that are counted."""
        self.active = FIRST_STEP <= trainer.global_step < LAST_STEP


class OneLayer(L.LightningModule):
    """A Qwen3 of one layer."""

    def configure_model(self) -> None:
        """Build the model."""
        config = Qwen3Config(
            vocab_size=260,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
        )
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="thd").train()

    def training_step(self, batch: THDBatch, _: int) -> torch.Tensor:
        """Return the loss of a pack."""
        return causal_lm_loss(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(self.model.parameters(), lr=1e-3)


def count_step() -> Counter[tuple[str, str]]:
    """Return the calls of the steps that are counted, by file and function."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    counted = Counted()
    dataset = [{"input_ids": list(f"document {i} ".encode()) * (1 + i % 3)} for i in range(2_000)]
    trainer = L.Trainer(
        max_steps=LAST_STEP + 5,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[counted],
    )
    threading.setprofile(counted.see)
    sys.setprofile(counted.see)
    try:
        trainer.fit(OneLayer(), THDDataModule(dataset, capacity=256))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return counted.calls


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calls", action="store_true", help="list the calls of a step by file")
    args = parser.parse_args(argv)
    modules = [path for path in sources("lightning_thd") if path.name != "__init__.py"]
    calls = count_step()
    steps = LAST_STEP - FIRST_STEP
    by_file: Counter[str] = Counter()
    for (file, _), number in calls.items():
        by_file[file] += number
    found = [
        ("lines of the package", lines("lightning_thd"), LINES),
        ("modules of the package", len(modules), MODULES),
        ("lines of the tests", lines("tests"), TEST_LINES),
        ("calls of a plain step", round(sum(calls.values()) / steps), CALLS),
        ("files of a plain step", len(by_file), FILES),
    ]
    for what, number, goal in found:
        print(f"{what}: {number:,} (goal <= {goal:,})")
        less(what, number, "", goal)
    if args.calls:
        for file, number in sorted(by_file.items()):
            here = [(name, n) for (f, name), n in sorted(calls.items()) if f == file]
            names = ", ".join(f"{name} {n / steps:.1f}" for name, n in here)
            print(f"{number / steps:7.1f} {file}: {names}")


if __name__ == "__main__":
    main()
